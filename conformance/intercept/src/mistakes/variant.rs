use clap::ValueEnum;

/// What a right implementation does otherwise than ours: allowed, and so no reason to accuse it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum Variant {
    /// Ends a connection at a window of another length, and at a message that carries an immediate.
    EndsAtOnce,
    /// Ends a connection at a keepalive that carries an immediate, and at no registration that
    /// does.
    EndsAtKeepalive,
    /// A client that asks for features again and again, whatever is under way.
    AsksAgain,
}
