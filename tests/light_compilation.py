"""How processes of tests compile, as flags of XLA."""

#: XLA's own passes stay the same, LLVM's are left out: tests compile much and compute little.
LIGHT_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
