"""Worker groups: the ranks of one or several roles behind one object, in this process or on Ray."""
