"""Are the schemes what they promise? Certificates that are measured, in float64 and in the formats that runs use."""

from posbench.verify.certificates import APART, EXACT, Certificate, Check, certify, relativity
from posbench.verify.listing import list_schemes
from posbench.verify.measures import shift_drift
from posbench.verify.show import verify
from posbench.verify.specimen import MODEL, VOCAB, certificate_config, random_tokens, randomise

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
    "shift_drift",
    "verify",
]
