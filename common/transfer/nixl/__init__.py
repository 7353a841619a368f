"""The transfer contract over NIXL (UCX: shared memory, TCP or RDMA).

In come regions, announcements and checked reads; out go bytes in their destinations and typed errors. Only ``agent``
and ``bindings`` touch the third-party library, which is loaded when the first backend is made; none of its exceptions
leaves this folder.
"""
