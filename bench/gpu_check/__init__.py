"""What a GPU is needed for: the timing of chronica_hvd checked on a real one, block by block.

``scripts/gpu_check.sh`` runs it.
"""
