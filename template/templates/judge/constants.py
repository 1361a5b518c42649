WORDS = ["apple", "bread", "chair", "dream", "eagle", "flame", "grape", "house", "ivory", "joker", "knife", "lemon"]
WORDS += ["mango", "night", "ocean", "paper", "queen", "river"]
