"""What is known of model types by their names: data, which the rest of the program asks for."""
