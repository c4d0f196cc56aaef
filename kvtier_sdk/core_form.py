"""Whether the core runs as compiled code. A wheel may compile the modules of the core."""

#: True if this module, and with it the manager and the policies, runs as compiled code.
IS_COMPILED = not __file__.endswith(".py")

CORE = "compiled" if IS_COMPILED else "pure Python"
