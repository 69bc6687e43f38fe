"""What keeps the factory true: wheels by cibuildwheel in a container, builds compared, another MLX; whether the tests notice a change."""
