WORDS = ["apple", "bread", "chair", "dream", "eagle", "flame", "grape", "house", "ivory", "joker", "knife", "lemon"]
