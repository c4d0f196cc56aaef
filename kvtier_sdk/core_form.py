"""The form of the core, the modules that a wheel may compile: compiled or pure Python."""

#: True if this module, and with it the manager and the policies, runs as compiled code.
IS_COMPILED = not __file__.endswith(".py")

CORE = "compiled" if IS_COMPILED else "pure Python"
