"""The build: starts the build front end, and gives CMake the declared matrix."""
