"""The build itself: the build front end is started, and CMake gets from here what is declared."""
