NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gia", "Hugo", "Ines", "Jon"]
CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Delhi", "Paris", "Quito", "Turin", "Vienna", "York"]
