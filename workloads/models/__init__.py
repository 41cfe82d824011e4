"""Models of published sizes, each a file with `SIZES` and `build(size, devices, ...) -> Case`."""
