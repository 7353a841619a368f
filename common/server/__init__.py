"""What every app of the service runs in: a listening socket, bounded connections, who may come in, how it drains.

In come a Starlette app, a bound socket and its limits; out go requests that have an id, a right to be here and a body
of bounded size, and a process's exit status. Nothing here knows what a request asks for.
"""
