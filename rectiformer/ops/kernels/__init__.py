"""Triton kernels. Imported only where Triton is installed and a call is going to use them."""
