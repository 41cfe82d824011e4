"""Efficiency of scaling image classifiers to 512 GPUs, predicted, beside what Horovod's authors published."""
