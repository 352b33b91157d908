"""Do schemes keep their promises? Certificates measure it, in float64 and in the number formats of runs."""

from posbench.verify.certificates import APART, EXACT, Certificate, Check, certify, relativity
from posbench.verify.random_model import MODEL, VOCAB, certificate_config, random_tokens, randomise
from posbench.verify.show import list_schemes, verify

__all__ = [
    "APART",
    "EXACT",
    "MODEL",
    "VOCAB",
    "Certificate",
    "Check",
    "certificate_config",
    "certify",
    "list_schemes",
    "random_tokens",
    "randomise",
    "relativity",
    "verify",
]
