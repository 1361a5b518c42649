    count, largest = {"easy": (2, 50), "hard": (4, 99)}[settings.DIFFICULTY]
    while True:
        numbers = [rng.randint(1, largest) for _ in range(count)]
        target, expression = numbers[0], str(numbers[0])
        for number in numbers[1:]:
            symbol = rng.choice("+-*" if target >= number else "+*")
            target = {"+": target + number, "-": target - number, "*": target * number}[symbol]
            expression = f"({expression}{symbol}{number})"
        expression = expression[1:-1]
        demonstration = f"<think>{expression}={target}</think>\n<answer>{expression}</answer>"
        yield example(numbers, target, demonstration)
