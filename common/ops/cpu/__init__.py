"""The compiled ops (backend "cpp"): float32 and bfloat16 on the CPU, from the C++ sources in ``src``.

``build.py`` compiles and loads the library, ``launch.py`` calls a kernel, ``backend.py`` implements the interface;
``linear.py``, ``norm.py`` and ``elementwise.py`` are the kernels that replace torch's between the ops. The Python side
checks shapes, the step its block tables and slots (``common.ops.step.check``); kernels trust both. Nothing here knows
transformers' modules.
"""
