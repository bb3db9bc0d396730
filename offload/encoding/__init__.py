"""How the bytes of a checkpoint become numbers. Torch is imported only to expand them."""
