"""Media types of the items of an evidence collection, for drivers and verifiers."""

from typing import Final

SNP_REPORT: Final = "application/vnd.sealane.snp-report"
TDX_QUOTE: Final = "application/vnd.sealane.tdx-quote"
SNP_CERTIFICATES: Final = "application/vnd.sealane.snp-certificate-table"
NVIDIA_EVIDENCE: Final = "application/vnd.sealane.nvidia-evidence"
CARD_EVIDENCE: Final = "application/vnd.sealane.card-evidence"
