"""What a model runs on, chosen once when it is loaded (``create.py``).

A backend (``backend.py``) has the ops, puts what they bring along into a loaded model, brings a step's words to the
device, and says when a launched step is over. On a CPU (``cpu.py``) decode steps are replayed; on a GPU (``cuda.py``)
they are CUDA graphs, one for each of a few numbers of rows (``graphs.py``).
"""
