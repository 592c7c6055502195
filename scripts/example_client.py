"""Asks a running `coli serve` one question: python scripts/example_client.py --max-tokens 100 --temperature 0.9"""

import argparse
import sys

from coli.errors import ColiError
from coli.speculant import Client


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask a running `coli serve` one question.")
    parser.add_argument("prompt", nargs="?", default="List as NDJSON. Orders: 3 lamps for Ana at 20 each.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float)
    args = parser.parse_args()
    client = Client(args.url, args.api_key)
    try:
        print(f"Model: {client.health().model_name}", file=sys.stderr)
        answer = client.generate(args.prompt, max_tokens=args.max_tokens, temperature=args.temperature)
    except ColiError as error:
        print(error, file=sys.stderr)
        return 1
    print(answer.text)
    print(f"{answer.generated_tokens} tokens, acceptance rate {answer.acceptance_rate:.2%}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
