"""The workers that sample, and the handing out of prompts to them."""
