"""Steps of one token, captured once and launched for each: the captured graph, what it was captured of, and its memory."""
