"""Every exception securefl raises, in one small tree.

`exit_code` is what the command line returns for it: 2 bad usage or configuration, 3 refused by a
policy or a budget, 4 a protocol or verification failure, 1 anything else. A message is one sentence that
names the file, row, field or peer and says what to do; it never contains a row's text, a key or a
passphrase.

    SecureflError                      1
      UsageError                       2
        ConfigError                      the configuration file, or a field of it
        DataError                        a data file, or a row of it
        ModelError                       a model folder or name
        NotAvailable                     a protection or option that this version does not have
      Refused                          3
        PolicyRefusal                    the silo's own policy forbids it
        AwaitingApproval                 the policy wants an owner to approve the plan first
        BudgetExceeded                   it would cross the privacy ceiling
      Cancelled                        1 the caller stopped the work
      ProtocolError                    4
        EnvelopeError
          MalformedEnvelope              not the one byte string of a message
          UnsupportedEnvelope            unknown version, suite or kind
          TooLarge                       a size above its limit
          UnknownSender                  not in the roster
          BadSignature                   one of the two signatures does not hold
          WrongRecipient                 addressed to somebody else
          DecryptionFailed               the sealed content does not open
          WrongRun, WrongRound           a message of another run or round
          Replayed                       a sequence number that was seen before
        PayloadError                     the opened content breaks its format
          WrongShape                     a tensor of another name, shape or type than agreed
          NonFiniteUpdate                NaN or infinity in it
        LedgerCorrupt                    the hash chain or a signature of a ledger does not hold
        TooFewSilos                      not enough answers to go on with the round
        MaskingAborted                   a masked round ended: somebody broke its protocol
"""

from __future__ import annotations


class SecureflError(Exception):
    """Base of all errors of this package."""

    exit_code = 1


class UsageError(SecureflError):
    """The caller has to change something: a file, a field, an argument."""

    exit_code = 2


class ConfigError(UsageError):
    """The configuration file, or a field of it, is not usable."""


class DataError(UsageError):
    """A data file, or a row of it, is not usable."""


class ModelError(UsageError):
    """A model folder or name is not usable."""


class NotAvailable(UsageError):
    """The configuration asks for something this version does not have; it is never silently weakened."""


class Cancelled(SecureflError):
    """The caller, through its callable, stopped the work; nothing of it is kept or sent."""


class Refused(SecureflError):
    """A policy or a budget forbids the action. clause: of the policy, as the ledger records it."""

    exit_code = 3

    def __init__(self, message: str, clause: str = "policy") -> None:
        super().__init__(message)
        self.clause = clause


class PolicyRefusal(Refused):
    """The silo's own policy forbids the action; the message names the clause."""


class AwaitingApproval(Refused):
    """Nothing was answered: the plan waits until an owner approves `plan`, its hash."""

    def __init__(self, message: str, plan: str) -> None:
        super().__init__(message, "approval")
        self.plan = plan


class BudgetExceeded(Refused):
    """The release would cross the privacy ceiling of the data set."""


class ProtocolError(SecureflError):
    """A message or a stored record failed verification."""

    exit_code = 4


class EnvelopeError(ProtocolError):
    """An envelope was refused."""


class MalformedEnvelope(EnvelopeError):
    """The bytes are not the one canonical encoding of an envelope."""


class UnsupportedEnvelope(EnvelopeError):
    """Unknown version, suite or kind."""


class TooLarge(EnvelopeError):
    """A declared or real size is above its limit."""


class UnknownSender(EnvelopeError):
    """The sender is not in the roster."""


class BadSignature(EnvelopeError):
    """One of the two signatures does not hold."""


class WrongRecipient(EnvelopeError):
    """The envelope is addressed to somebody else."""


class DecryptionFailed(EnvelopeError):
    """The sealed content does not open."""


class WrongRun(EnvelopeError):
    """A message of another run."""


class WrongRound(EnvelopeError):
    """A message of another round or step."""


class Replayed(EnvelopeError):
    """A sequence number that was already used."""


class PayloadError(ProtocolError):
    """The opened content breaks its format."""


class WrongShape(PayloadError):
    """A tensor of another name, shape or type than agreed."""


class NonFiniteUpdate(PayloadError):
    """NaN or infinity in an update."""


class LedgerCorrupt(ProtocolError):
    """The hash chain or a signature of a ledger does not hold."""


class TooFewSilos(ProtocolError):
    """Not enough answers to go on with the round."""


class MaskingAborted(ProtocolError):
    """A masked round is over for who raises this: another party broke its protocol."""
