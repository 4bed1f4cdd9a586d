"""The OpenAI API of the data port: parsing, text, answers and their streaming."""
