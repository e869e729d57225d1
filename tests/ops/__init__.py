"""Tests of the operators and their kernels."""
