"""The rates that makers state for their devices: what MFU and plans are measured by."""

# Dense bf16 rates of the makers' datasheets, FLOP/s, of the SXM parts (an H100 for PCIe: 756e12): what MFU is usually
# quoted against.
DATASHEET = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def datasheet_rate(name: str) -> float | None:
    """The maker's rate of the device of that name (`Device.describe`), FLOP/s; None where it is not known."""
    return next((rate for key, rate in DATASHEET.items() if key in name), None)
