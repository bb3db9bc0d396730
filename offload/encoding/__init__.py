"""How stored bytes become numbers. No torch until they do."""
