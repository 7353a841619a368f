"""The ops in Triton (backend "triton"): float32, bfloat16 and float16 on a GPU.

Kernels read a step as int32 words on the device (``common.ops.step.device_step``) and the pools in place: states by
slot, K/V by block. Offsets into pools are 64 bits wide. Float32 products are of full precision, never tf32. Nothing
here knows transformers' modules.
"""
