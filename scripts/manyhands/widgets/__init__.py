"""Pictures with controls, for the notebook's own kernel: the bits of a float, the memory of a model.

    show_floats(); show_memory()                        # controls in JupyterLab; a static picture elsewhere
    figure, alt = memory_picture(model="7B", ranks=64)   # the picture alone, a matplotlib Figure, and its text
    bits(0.1, "bf16").fraction                          # '1001101'

Nothing here joins or needs ranks.
"""
