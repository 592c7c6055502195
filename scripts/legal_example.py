"""Builds a graph of a contract and asks a model about it: python scripts/legal_example.py --model NAME

Without --model the built-in demo model answers, which knows no law; a pulled one does better.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from coli.errors import ColiError
from coli.speculant import DraftConfig, GenerationConfig, GraphBuilder, GraphConfig, SpeculativeDecoder, VerifierConfig

CONTRACT = Path(__file__).parent / "legal_contract.md"
QUESTIONS = ("What is a force majeure clause?", "When may a party end this Agreement?", "Who pays for a claim?")


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask a model about a contract, with drafts from its text.")
    parser.add_argument("--model", help="container, pulled name or pulled hub id")
    parser.add_argument("--max-tokens", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    named = {} if args.model is None else {"model_name": args.model}
    try:
        with tempfile.TemporaryDirectory() as folder:
            verifier_config = VerifierConfig(**named)
            graph_config = GraphConfig(tokenizer_name=verifier_config.model_name)
            builder = GraphBuilder(
                tokenizer_name=graph_config.tokenizer_name,
                max_order=graph_config.max_order,
                chunk_size=graph_config.chunk_size,
            )
            graph = builder.build_from_files([CONTRACT])
            builder.save(f"{folder}/legal.safetensors")
            print(f"{graph.num_tokens} tokens, contexts by order {graph.contexts}", file=sys.stderr)
            draft_config = DraftConfig(k=8, strategy="greedy")
            with SpeculativeDecoder(f"{folder}/legal.safetensors", verifier_config, draft_config) as decoder:
                for question in QUESTIONS:
                    config = GenerationConfig(max_tokens=args.max_tokens, temperature=args.temperature)
                    result = decoder.generate(question, config)
                    print(f"{question}\n{result.text}\n")
                    print(
                        f"acceptance rate: {result.acceptance_rate:.2%}, by position (accepted, compared): "
                        f"{result.position_acceptance}",
                        file=sys.stderr,
                    )
    except ColiError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
