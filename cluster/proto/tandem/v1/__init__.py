"""Version 1 of the API: messages and stubs generated from the files beside this one."""
