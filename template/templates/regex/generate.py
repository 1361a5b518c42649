    years = {"easy": 10, "hard": 1000}[settings.DIFFICULTY]
    while True:
        day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randrange(2000, 2000 + years)
        name = MONTHS[month - 1]
        demonstration = f"<think>{name} is month {month}</think>\n<answer>{day}/{month}/{year}</answer>"
        yield example(f"Write {name} {day}, {year} as day/month/year.", f"0?{day}/0?{month}/{year}", demonstration)
