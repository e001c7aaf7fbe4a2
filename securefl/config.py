"""The TOML file as pydantic models: the one list of keys, each with its default and its meaning.

The larger sections have rooms of their own: `data_terms`, `privacy_terms`, `protection_terms` and
`crosslm_terms`. Unknown keys are errors. What a later version will offer and this one does not is refused by
name (`NotAvailable`), never replaced by something weaker. This room reads one file and touches nothing else.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from securefl.crosslm_terms import CrossLm
from securefl.data_terms import Data
from securefl.errors import ConfigError, NotAvailable, UsageError
from securefl.files import read_limited
from securefl.messages import NAME, RUN, Compose, Step, layer_of
from securefl.privacy_terms import (
    EPSILONS,
    CentroidPrivacy,
    DpSgdPrivacy,
    MetricPrivacy,
    ModelPrivacy,
    Privacy,
    Section,
)
from securefl.protection_terms import MASKED_ONLY, SUMS_ONLY, Protection

METHODS = ("standalone", "fedavg", "fedprox", "fedsgd", "fedkc", "crosslm", "datafree-kd")
# Methods of one global model, made from the mean of what the silos send.
AVERAGING = ("fedavg", "fedprox", "fedsgd", "fedkc")
# Methods in which each silo's model comes to the server's language model by itself (`lanes`).
ARRIVING = ("crosslm", "datafree-kd")
_MAX_FILE = 2**20  # bytes
_MAX_WHERE = 100  # characters of a field's name that a message repeats
PLACE = r"^[^\x00]+$"  # what can be a path
PERMIT_EMBEDDINGS = "the tokens of these rows can be read back from what is shared"


class Drop(Section):
    """A silo that does not answer from `step` on, to the end of the round."""

    round: int | None = Field(None, ge=1, le=10_000)
    step: Step = Field(strict=False)


class Federation(Section):
    method: Literal["standalone", "fedavg", "fedprox", "fedsgd", "fedkc", "crosslm", "datafree-kd"] = Field(
        description="How the silos learn from each other. `fedsgd`, for study: each sends the gradient of "
        "one batch a round, which gives its texts away."
    )
    rounds: int = Field(3, ge=1, le=10_000, description="Rounds; round 1 is each silo's own first training.")
    seed: int = Field(
        0, ge=0, lt=2**31, description="Makes a simulation repeatable; noise from it is marked."
    )
    mu: float = Field(
        0.01,
        ge=0,
        le=1e4,
        description="Of `fedprox`: how strongly a silo's training holds on to the model that it received.",
    )
    active: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Silos that take part in a round, of methods that average models, drawn anew for each by "
        "the run's id; unset: all.",
    )
    join: dict[str, Annotated[int, Field(ge=1, le=10_000)]] = Field(
        default={},
        description="Silos that take part from a later round on: `{ silo-4 = 3 }`.",
    )
    leave: dict[str, Annotated[int, Field(ge=1, le=10_000)]] = Field(
        default={},
        description="Silos that take part in this round for the last time, and do not get the last model.",
    )
    local_head: tuple[str, ...] = Field(
        (),
        strict=False,
        description="Silos that keep the head of their model to themselves: they train and use their own, "
        "and send the received one back unchanged.",
    )
    drop: dict[str, Drop] = Field(
        default={},
        description="Silos of a simulation that fall silent: "
        '`{ silo-1 = { round = 2, step = "deal" } }`; without a round, in each.',
    )
    speed: dict[str, Annotated[float, Field(ge=1e-3, le=1e3)]] = Field(
        default={},
        description="How fast silos of a simulation train, unset 1: `{ silo-1 = 2.0 }`; decides in which "
        "order their models come to the language model of `crosslm` and `datafree-kd`.",
    )


class Lora(Section):
    r: int = Field(ge=1, le=512, description="Rank of the adapter.")
    alpha: int | None = Field(None, ge=1, le=2**16, description="Its scale is alpha / r; unset: 2 r.")


# Learning rates of encoder and head where they are unset: of all weights, and of an adapter.
_RATES = ((2e-4, 5e-3), (1e-3, 5e-3))
_PRIVATE_RATES = ((1e-4, 2e-2), (1e-3, 2e-2))
_STEP_RATE = 0.1  # of FedSGD


class Slm(Section):
    models: tuple[str, ...] = Field(
        ("builtin:minilm",),
        min_length=1,
        strict=False,
        description="Encoder folder, hub name or builtin:minilm; one for all silos, or one per silo.",
    )
    max_length: int = Field(64, ge=4, le=512, description="Tokens kept of a text.")
    epochs: int = Field(3, ge=1, le=1000, description="Local passes in round 1.")
    round_epochs: int | None = Field(None, ge=1, le=1000, description="Local passes later; unset: `epochs`.")
    batch_size: int = Field(
        16,
        ge=1,
        le=4096,
        description="Rows a step; under DP-SGD what the noisy sum of a step is divided by, a public guess.",
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        le=1,
        description="AdamW's, for the encoder; unset: 2e-4, under DP-SGD 1e-4, for an adapter 1e-3. Of "
        "`fedsgd` the plain step's, for all that trains; unset: 0.1.",
    )
    head_learning_rate: float | None = Field(
        None, gt=0, le=1, description="AdamW's, for the new linear head; unset: 5e-3, under DP-SGD 2e-2."
    )
    train_embeddings: bool = Field(
        False,
        description="Train (and send) the token table too. Off: which of its rows changed would tell the "
        "reader which words a silo holds.",
    )
    lora: Lora | None = Field(
        None,
        description="Train (and send) a low-rank adapter and the head only: `{ r = 8 }`; its scale is "
        "alpha / r, and `alpha` unset 2 r.",
    )

    @model_validator(mode="after")
    def _one_of(self) -> Slm:
        if self.lora is not None and self.train_embeddings:
            raise ValueError("set lora or train_embeddings, not both: an adapter leaves the table alone")
        return self

    def learning_rates(self, *, private: bool) -> tuple[float, float]:
        """AdamW's, of encoder (or adapter) and head; private: under DP-SGD.

        A private training has few steps, each over many rows, so that the head has to go far in each; and
        every step moves every weight by about its rate, mostly at random: the more weights, the lower it is.
        """
        encoder, head = _PRIVATE_RATES[self.lora is not None] if private else _RATES[self.lora is not None]
        return self.learning_rate or encoder, self.head_learning_rate or head


_TRAINED_ONLY = ("epochs", "round_epochs", "head_learning_rate")


class FedKc(Section):
    clusters: int = Field(4, ge=1, le=4096, description="KMeans clusters a silo.")
    alpha: float = Field(0.5, ge=0, le=1e4, description="Weight of the consistency loss.")
    compose: Compose = Field(
        "pooled",
        description="What is averaged: pooled vectors, or outputs of the embedding layer or of the encoder "
        "layer with this number.",
    )
    source: Literal["peers", "own"] = Field("peers", description="`own`: own centroids, nothing exchanged.")
    weights: Literal["uniform", "size"] = Field("uniform", description="Of the clusters in the loss.")
    per_step: int | None = Field(
        None, ge=1, le=2**20, description="Centroids in the loss of a step, drawn anew; unset: all of them."
    )

    @property
    def layer(self) -> int | None:
        """The layer whose outputs are averaged, 0 for the embedding layer; None for pooled vectors."""
        return layer_of(self.compose)


class PolicyTerms(Section):
    """What `simulate` writes into each silo's policy beyond what the configuration asks for."""

    allow_embedding_centroids: (
        Literal["the tokens of these rows can be read back from what is shared"] | None
    ) = Field(None, description="Needed, word for word, for un-noised centroids of the embedding layer.")
    max_epsilon: float = Field(
        50.0, ge=EPSILONS[0], le=EPSILONS[1], description="Lifetime ceiling of a silo's private releases."
    )


CLIENT_PLACES = ("identity", "trust", "policy", "ledger", "state")


class ClientTerms(Section):
    """Where one silo keeps what is its own, and with whom it works: for `securefl client` and embedding.

    Relative paths are relative to the configuration file: a silo started elsewhere has the same ledger.
    """

    identity: str = Field(pattern=PLACE, description="Its private key file (`securefl keygen`).")
    trust: str = Field(pattern=PLACE, description="Folder of pinned cards (`securefl trust`).")
    server: str = Field(pattern=NAME, description="Name of the server's card in it.")
    peers: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field(
        min_length=1,
        max_length=255,
        strict=False,
        description="Names of the other silos' cards in it: the cohort.",
    )
    run: str = Field(pattern=RUN, description="The run it takes part in: 32 hex digits that all agreed on.")
    dataset: str = Field(pattern=NAME, description="What its rows are called in the policy and the ledger.")
    policy: str = Field("policy.toml", pattern=PLACE, description="Its policy file.")
    ledger: str = Field("ledger.jsonl", pattern=PLACE, description="Its ledger (`securefl ledger begin`).")
    state: str = Field(
        "state",
        pattern=PLACE,
        description="Folder for answers on their way and plans that wait; made if need be.",
    )


class Config(Section):
    federation: Federation
    data: Data
    slm: Slm = Slm()
    privacy: Privacy = Privacy()
    protection: Protection = Protection()
    fedkc: FedKc = FedKc()
    crosslm: CrossLm = CrossLm()
    policy: PolicyTerms = PolicyTerms()
    client: ClientTerms | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_protection(cls, document: Any) -> Any:
        """Where models are averaged nobody has to read one, so the sum is the default."""
        if not isinstance(document, dict) or not isinstance(document.get("federation"), dict):
            return document
        protection = document.get("protection", {})
        if not isinstance(protection, dict) or protection.get("models") is not None:
            return document
        averaged = document["federation"].get("method") in AVERAGING
        return {**document, "protection": {**protection, "models": "masked" if averaged else "sealed"}}

    @property
    def sums_models(self) -> bool:
        """Whether the server gets the silos' models as a sum only."""
        return self.federation.method in AVERAGING and self.protection.models != "sealed"

    @property
    def mu(self) -> float:
        """Weight of the proximal term in local training; 0 for every method but FedProx."""
        return self.federation.mu if self.federation.method == "fedprox" else 0.0

    @property
    def sends_gradients(self) -> bool:
        """Whether silos answer with the gradient of one batch, and the server takes the step."""
        return self.federation.method == "fedsgd"

    @property
    def step_rate(self) -> float:
        """Learning rate of the step that FedSGD takes."""
        return self.slm.learning_rate or _STEP_RATE

    def round_epochs(self, round_number: int) -> int:
        """Local passes of a round, counted from 1; under FedSGD its one batch counts as one."""
        if self.sends_gradients:
            return 1
        return self.slm.epochs if round_number == 1 else (self.slm.round_epochs or self.slm.epochs)


def _refuse_unavailable(config: Config) -> None:
    """Fail closed on what is in the format but not in this version."""
    missing = {
        'protection.centroids = "sealed"': config.protection.centroids != "peer",
    }
    for field, asked in missing.items():
        if asked:
            raise NotAvailable(
                f"{field} is not available in this version and nothing weaker is used in its place"
            )


def _refuse_averages(config: Config, name: str) -> None:
    """Refuse ways to average that the method or the protection has no place for."""
    terms, method = config.protection, config.federation.method
    if terms.average != "mean" and terms.models != "sealed":
        raise ConfigError(
            f'{name}: protection.average: the {terms.average} needs each model, and under "{terms.models}" '
            'the server has their sum alone; write models = "sealed" too, or average = "mean"'
        )
    asked = {"average": terms.average != "mean", "max_norm": terms.max_norm is not None}
    asked["local_head"] = bool(config.federation.local_head)
    for key, set_ in asked.items():
        section = "federation" if key == "local_head" else "protection"
        if set_ and (method not in AVERAGING or config.sends_gradients):
            raise ConfigError(
                f"{name}: {section}.{key}: {method} averages no models, so it has no effect; leave it out"
            )


def _refuse_participation(config: Config, name: str) -> None:
    """Refuse cohorts that change from round to round where all silos are needed in each."""
    federation = config.federation
    changing = [key for key in ("active", "join", "leave") if getattr(federation, key)]
    if not changing:
        return
    key = f"{name}: federation.{changing[0]}"
    if federation.method not in AVERAGING:
        raise ConfigError(f"{key}: {federation.method} has no rounds of several silos; leave it out")
    if config.protection.models == "ckks":
        raise ConfigError(
            f'{key}: under "ckks" the cohort of round 1 shares a key to the end; write "masked" or "sealed"'
        )
    if config.privacy.models is not None:
        raise ConfigError(
            f"{key}: the noise of privacy.models is shared out among all silos of the run; leave one of the "
            "two out"
        )
    for silo, first in federation.join.items():
        if first > min(federation.leave.get(silo, first), federation.rounds):
            raise ConfigError(
                f"{name}: federation.join: {silo} would join after it has left, or after the last round"
            )


def parse_config(document: dict[str, Any], name: str = "configuration") -> Config:
    """Validate a parsed TOML document. `name` (the file) begins the message of a ConfigError."""
    try:
        config = Config.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:_MAX_WHERE] or "the file"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        reason = (
            "unknown field"
            if first["type"] == "extra_forbidden"
            else "wants a table, such as { key = value }"
            if first["type"] == "model_type"
            else first["msg"].removeprefix("Value error, ")
        )
        raise ConfigError(f"{name}: {where}: {reason}{more}") from error
    _refuse_unavailable(config)
    if config.protection.models != "sealed" and config.federation.method not in AVERAGING:
        raise ConfigError(
            f'{name}: protection.models: {config.federation.method} has nothing to sum; write "sealed"'
        )
    if config.protection.models != "sealed" and config.sends_gradients:
        raise ConfigError(
            f"{name}: protection.models: fedsgd is there to show what a server reads in the gradient of one "
            'batch, so it gets each silo\'s; write "sealed", or use fedavg for sums that hide it'
        )
    if config.privacy.models is not None and config.protection.models != "masked":
        raise ConfigError(
            f"{name}: privacy.models: noise is shared out among the silos of a masked sum; it needs a method "
            'that averages models and protection.models = "masked"'
        )
    if config.data.pair is not None and config.federation.method in ARRIVING:
        raise ConfigError(
            f"{name}: data.pair: the language model of {config.federation.method} writes single texts; use "
            "an averaging method, or leave data.pair out"
        )
    _refuse_contradictions(config, name)
    if len(config.slm.models) > 1 and config.federation.method in AVERAGING:
        raise ConfigError(
            f"{name}: slm.models: {config.federation.method} averages weights and needs one model"
        )
    return config


def _refuse_contradictions(config: Config, name: str) -> None:
    """Refuse privacy terms that would not mean what they say together."""
    privacy = config.privacy
    if privacy.dp_sgd is not None:
        if config.sends_gradients:
            raise ConfigError(
                f"{name}: privacy.dp_sgd: the gradients of fedsgd leave without noise; leave it out, or use "
                "fedavg, whose trainings it makes private"
            )
        if privacy.adjacency != "add-remove":
            raise ConfigError(
                f'{name}: privacy.adjacency: DP-SGD is accounted for under "add-remove" alone; write that'
            )
        if privacy.models is not None:
            raise ConfigError(
                f"{name}: privacy.models: is noise for a silo's whole data and privacy.dp_sgd for its units; "
                "set one of them"
            )
        if config.federation.method == "fedkc" and config.fedkc.source == "own":
            raise ConfigError(
                f'{name}: fedkc.source: a silo\'s "own" centroids would steer its DP-SGD unaccounted; write '
                '"peers"'
            )
    if config.federation.speed and config.federation.method not in ARRIVING:
        raise ConfigError(
            f"{name}: federation.speed: {config.federation.method} waits for all silos in every round, so it "
            "has no effect; leave it out"
        )
    _refuse_participation(config, name)
    _refuse_averages(config, name)
    if privacy.centroids.noised and config.federation.method != "fedkc":
        raise ConfigError(
            f"{name}: privacy.centroids: {config.federation.method} shares no centroids, so their budget has "
            "no effect; leave it out, or use fedkc"
        )
    if privacy.centroids.noised and config.federation.rounds < 2:
        raise ConfigError(
            f"{name}: privacy.centroids: centroids are shared from round 2 on, so one round shares none; "
            "set federation.rounds to 2 or more, or leave the budget out"
        )
    if privacy.metrics is not None and config.protection.models == "ckks":
        raise ConfigError(f"{name}: privacy.metrics: under ckks no figure is told; leave it out")


def _refuse_idle(config: Config, name: str) -> None:
    """Refuse a setting that the chosen protection or method does not look at."""
    models = config.protection.models
    idle = {"sealed": SUMS_ONLY, "ckks": MASKED_ONLY}.get(models or "", ())
    for key in sorted(config.protection.model_fields_set.intersection(idle)):
        raise ConfigError(f"{name}: protection.{key}: has no effect where models are {models}; leave it out")
    unread = _TRAINED_ONLY if config.sends_gradients else ()
    for key in sorted(config.slm.model_fields_set.intersection(unread)):
        raise ConfigError(f"{name}: slm.{key}: has no effect under fedsgd, a step a round; leave it out")


def load_config(path: Path | str) -> Config:
    """Read a TOML file. Raises ConfigError or NotAvailable with one sentence."""
    path = Path(path)
    try:
        document = tomllib.loads(read_limited(path, _MAX_FILE).decode("utf-8"))
    except UsageError as error:
        raise ConfigError(str(error)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nests its values too deeply; no setting needs that") from error
    except ValueError as error:  # Python's limit on the digits of an integer
        raise ConfigError(f"{path}: holds a number of too many digits") from error
    config = parse_config(document, str(path))
    _refuse_idle(config, str(path))
    if config.client is None:
        return config
    folder = path.absolute().parent
    places = {key: str(folder / getattr(config.client, key)) for key in CLIENT_PLACES}
    return config.model_copy(update={"client": config.client.model_copy(update=places)})


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        shown = {key: part for key, part in value.model_dump(mode="json").items() if part is not None}
        return "`{ " + ", ".join(f"{key} = {json.dumps(part)}" for key, part in shown.items()) + " }`"
    if value is None:
        return "unset"
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def reference() -> str:
    """Every key of the file as a Markdown table, made from the models above."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    nested: dict[str, type[BaseModel]] = {
        "privacy.dp_sgd": DpSgdPrivacy,
        "privacy.metrics": MetricPrivacy,
        "privacy.centroids": CentroidPrivacy,
        "privacy.models": ModelPrivacy,
    }
    for section, field in Config.model_fields.items():
        model = field.annotation
        if section == "client":  # optional as a whole
            model = ClientTerms
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        for key, part in model.model_fields.items():
            inner = nested.get(f"{section}.{key}")
            if inner is None:
                rows.append(f"| `{section}.{key}` | {_default(part)} | {part.description} |")
                continue
            for name, leaf in inner.model_fields.items():
                rows.append(f"| `{section}.{key}.{name}` | {_default(leaf)} | {leaf.description} |")
    return "\n".join(rows)
