"""The fast CPU backend: a small C++ library behind a C interface (csrc/), and its binding."""
