use std::time::Duration;

use clap::ValueEnum;
use rdma_conn::Options;

/// One mistake. Its name on the command line is that of the variant in lower case, with hyphens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
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
    /// Gives private data.
    PrivateData,
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
    /// Queue pairs, identifiers and queues stay when their connection has ended, and nobody is
    /// told.
    NeverLetsGo,
    /// Receives are not posted again.
    NeverReposts,
    /// Sixteen receives are posted, and no more.
    FewReceives,
    /// Work that fails is not noticed.
    FailuresUnnoticed,
    /// Ends connections without waiting until what was written has arrived.
    EndsWithoutWaiting,
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
    /// Of an immediate beyond the window as much is taken as the window has left.
    OverrunTaken,
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
    /// A window longer than 64 KiB is refused.
    LongWindowRefused,
    /// A SEND with an immediate is taken for payload.
    ImmediateOfSendCounted,
    /// A SEND with an immediate is ignored, message and all.
    ImmediateOfSendIgnored,
    /// A long message is taken for a keepalive.
    LongAccepted,
    /// Of connections only the first ten are taken.
    FewConnections,
    /// Of connections only the first two are taken.
    TwoConnections,
    /// The end of a connection, or its refusal, ends a thread.
    EndPanics,
    /// Time does not pass: whatever is waited for is waited for without end.
    ClockStands,
    /// A window that keeps the side waiting for 80 ms is refused.
    LateWindowRefused,
    /// A second window is refused.
    SecondWindowRefused,
    /// A window beyond the address space is ignored.
    WrappingWindowIgnored,
    /// Of more than 512 bytes that are told of at once the rest is forgotten.
    LongImmediateCut,
    /// Fewer than four bytes that are told of are forgotten.
    ShortImmediateIgnored,
    /// Every byte that is told of counts twice.
    HearsTwice,
    /// Immediates whose sum is 2^32.
    SumsWrap,
    /// Payload is refused of a peer that asked for no features.
    FeaturesRequired,
    /// Questions for features are answered once.
    FeaturesAnsweredOnce,
    /// A question for features before the window is refused.
    FeaturesBeforeWindowRefused,
    /// Feature messages that were not asked for are ignored.
    FeaturesUnaskedIgnored,
    /// Answers have the feature bits of the question.
    BitsEchoed,
    /// SetClientFeature is refused.
    SetRefused,
    /// SetClientFeature is answered.
    SetAnswered,
    /// Receives are not posted again while the program is idle.
    IdleWithoutReceives,
    /// An acknowledgement is taken for a proof that the notification was handled, whatever the
    /// peer's RNR retry count.
    AcknowledgedIsHandled,
    /// Of a client's questions for features only the first is asked.
    AskedOnce,
    /// An answer is taken for that to the question, whatever its `select`.
    SelectUnchecked,
    /// More than two hundred questions for features end a thread.
    FloodPanics,
    /// Receives are posted again 256 at a time.
    RepostsInBatches,
    /// The memory of a request is written again as soon as the request is posted.
    MemoryReused,
    /// Payload that has arrived is dropped when a connection event is waiting.
    EndFirst,
    /// A keepalive is left out if payload was sent since the last one was due.
    KeepalivesWhenIdle,
}

impl Mistake {
    /// Applies the mistake to settings.
    pub fn disturb(self, options: &mut Options) {
        match self {
            Self::TinyWindows => options.protocol.window = 1000,
            Self::EndsWithoutWaiting => options.linger = Duration::ZERO,
            Self::NoKeepalives => options.protocol.keepalive = Some(rdma_conn::Keepalive::NONE),
            Self::HugeWindowAccepted => options.protocol.window_limit = u32::MAX,
            Self::LongWindowRefused => options.protocol.window_limit = 64 << 10,
            _ => {}
        }
    }
}
