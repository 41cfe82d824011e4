"""The models of the benchmark, each a file with `SIZES` and `build(size, devices, ...) -> Case`."""
