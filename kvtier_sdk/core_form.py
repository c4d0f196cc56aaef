"""The form of the core: compiled into the installed wheel, or pure Python."""

#: True where the slot table, the lookups, the policies and the manager run as compiled code.
IS_COMPILED = not __file__.endswith(".py")

#: The form in words.
CORE = "compiled" if IS_COMPILED else "pure Python"
