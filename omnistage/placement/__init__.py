"""Where stages run and what they take there: the memory plan."""
