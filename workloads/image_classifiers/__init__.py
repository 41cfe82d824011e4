"""Image classifiers of the benchmarks of 2017, in plain JAX: ResNet-101, Inception V3 and VGG-16."""
