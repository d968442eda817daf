from tests.fuzz.harness import fuzz

if __name__ == "__main__":
    fuzz("statement")
