//! The mistakes there are.

use rdma_conn::Options;

/// One mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mistake {
    /// Messages of 31 bytes.
    ShortMessages,
    /// Registrations with little-endian fields.
    LittleEndianFields,
    /// Reserved bytes that are not zero.
    ReservedSet,
    /// No registration.
    NeverRegisters,
    /// One registration, and no other.
    RegistersOnce,
    /// A second registration when the first was hardly used.
    RegistersEarly,
    /// Windows that become shorter.
    ShrinkingWindows,
    /// Windows of 1000 bytes.
    TinyWindows,
    /// Immediates in the byte order of the machine.
    LittleEndianImmediates,
    /// Immediates of one byte too many.
    OneTooMany,
    /// An immediate of zero behind each other.
    ZeroBehindEach,
    /// Writes one byte behind where they belong.
    Shifted,
    /// Writes that are one byte longer than what is notified.
    WritesBehind,
    /// Writes to the first window that was given, whatever came later.
    FirstWindowForEver,
    /// No immediate.
    NoImmediates,
    /// Payload in a SEND.
    PayloadBySend,
    /// One byte of each long write is another.
    FlippedByte,
    /// Answers to questions for features that do not repeat `select`.
    SelectForgotten,
    /// A feature bit that is not defined.
    FeatureMadeUp,
    /// No answer to questions for features.
    FeaturesUnanswered,
    /// Two answers.
    FeaturesAnsweredTwice,
    /// An answer that nobody asked for.
    FeaturesUnprompted,
    /// Features set that were not offered.
    FeaturesSet,
    /// No keepalives.
    NoKeepalives,
    /// Keepalives are answered.
    KeepalivesAnswered,
    /// Keepalives are taken for unknown messages.
    KeepalivesRefused,
    /// Gives its peer no RNR retries.
    NoRnrRetries,
    /// Wants no RDMA READ where one is usual.
    OddDepths,
    /// Windows can be read.
    ReadableWindows,
    /// More can be written than the window.
    WindowsTooOpen,
    /// One protection domain for all.
    OneDomain,
    /// Regions stay registered when their connection has ended, in one protection domain for all.
    KeysOutlive,
    /// Queue pairs, identifiers and queues stay when their connection has ended, and nobody is told.
    NeverLetsGo,
    /// Receives are not posted again.
    NeverReposts,
    /// A short message is taken for a keepalive.
    ShortAccepted,
    /// An unknown opcode is taken for a keepalive.
    UnknownAccepted,
    /// Reserved bytes must be zero.
    ReservedJudged,
    /// An immediate of zero is an error.
    ZeroIsError,
    /// An immediate beyond the window is ignored.
    OverrunIgnored,
    /// An immediate of more than 1 GiB ends a thread.
    OverrunPanics,
    /// A window of no bytes is ignored.
    EmptyWindowIgnored,
    /// A window that comes early is ignored.
    EarlyWindowIgnored,
    /// A window of less than 4096 bytes is refused.
    SmallWindowRefused,
    /// A window that begins at an odd address is refused.
    OddWindowRefused,
    /// A window may have any length.
    HugeWindowAccepted,
    /// A window longer than 1 MiB is refused.
    LongWindowRefused,
    /// A SEND with an immediate is taken for payload.
    ImmediateOfSendCounted,
}

impl Mistake {
    /// What it does to settings.
    pub fn disturb(self, options: &mut Options) {
        match self {
            Self::TinyWindows => options.protocol.window = 1000,
            Self::NoKeepalives => options.protocol.keepalive.every = None,
            Self::HugeWindowAccepted => options.protocol.window_limit = u32::MAX,
            Self::LongWindowRefused => options.protocol.window_limit = 1 << 20,
            _ => {}
        }
    }
}
