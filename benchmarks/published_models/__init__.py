"""Models whose peak memory others have published, written anew from their descriptions as ordinary workloads.

What counts here is not the mathematics, which could be written shorter, but which tensors each expression makes and how
long they live: every one of them is in the published numbers.
"""
