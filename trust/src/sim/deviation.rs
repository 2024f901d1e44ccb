//! The rules that a rogue peer breaks, and the errors that its victim must report.

use rdma_conn::{Config, Error};
use rdma_proto::{Error as Protocol, InvalidMessage, PeerIncompatible, PeerMisbehaved};
use rdma_softsim::Random;

/// The action of a rogue once it is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deviation {
    /// Asks for a connection and never reports that it is ready.
    NeverReady,
    /// Nothing at all: no window, no answer, no end.
    Silence,
    /// Registers a window and reads nothing.
    Deaf,
    /// Posts few receives and then none, while its peer has much to send.
    Starving,
    /// Disappears without a disconnect, at any moment.
    Vanish,
    /// Takes its window away while the peer may be writing into it.
    WithdrawWindow,
    /// Announces more bytes than the window holds.
    Overrun,
    /// Announces bytes whose sum wraps around 32 bits.
    Wrap,
    /// A message with an unknown opcode.
    UnknownOpcode(u16),
    /// A message of another length than 32.
    Length(u8),
    /// A window of no bytes.
    EmptyWindow,
    /// A window of more bytes than the peer accepts.
    HugeWindow,
    /// A window that wraps around the address space.
    WrappedWindow,
    /// A window with a wrong key.
    BogusKey,
    /// A window before the last one is full.
    EarlyRegistration,
    /// More windows than may wait, once windows may be registered ahead.
    WindowsWithoutEnd,
    /// Sends, as a server, features that the client did not ask for.
    UnaskedFeatures,
    /// Sends, as a server, a message that only clients send.
    ServerSends,
    /// Different questions without end, and no receive for the answers.
    FeatureFlood,
    /// Writes beyond the end of the peer's window.
    WriteOutside,
    /// Fills each window of the peer's by its announcements, and writes into earlier windows, which
    /// may lie in memory that the program has taken back, or deregistered.
    Trespass,
    /// Reads the peer's window.
    ReadWindow,
    /// Odd things that are allowed: keepalives, reserved bits, unknown features, empty immediates.
    Odd,
}

impl Deviation {
    /// A deviation for a client or a server.
    pub fn draw(random: &mut Random, serves: bool) -> Self {
        loop {
            // Others are drawn in `Scenario`: `faces`, `windows_ahead` and `trespassers`.
            let drawn = random.pick(&[
                Self::Silence,
                Self::Deaf,
                Self::Starving,
                Self::Vanish,
                Self::WithdrawWindow,
                Self::Overrun,
                Self::Wrap,
                Self::UnknownOpcode(4),
                Self::UnknownOpcode(0xffff),
                Self::Length(0),
                Self::Length(31),
                Self::Length(33),
                Self::EmptyWindow,
                Self::HugeWindow,
                Self::WrappedWindow,
                Self::BogusKey,
                Self::EarlyRegistration,
                Self::UnaskedFeatures,
                Self::ServerSends,
                Self::FeatureFlood,
                Self::WriteOutside,
                Self::ReadWindow,
                Self::Odd,
            ]);
            let fits = match drawn {
                Self::UnaskedFeatures | Self::ServerSends => serves,
                Self::FeatureFlood => !serves,
                _ => true,
            };
            if fits {
                return drawn;
            }
        }
    }

    /// Returns whether `error` is one with which the victim may, or must, end the connection.
    pub fn is_answered_by(self, error: Option<&Error>) -> bool {
        if self == Self::NeverReady {
            return matches!(error, Some(Error::TimedOut { .. }));
        }
        let Some(Error::Protocol(error)) = error else {
            return matches!(
                self,
                Self::Silence
                    | Self::Deaf
                    | Self::Starving
                    | Self::Vanish
                    | Self::Odd
                    | Self::Trespass
                    | Self::WithdrawWindow
            );
        };
        let misbehaved =
            |wanted: fn(&PeerMisbehaved) -> bool| matches!(error, Protocol::PeerMisbehaved(m) if wanted(m));
        match self {
            // The sum wraps in a window that is not full, and before the next one in a full one.
            Self::Overrun | Self::Wrap => misbehaved(|m| {
                matches!(m, PeerMisbehaved::WindowOverrun { .. } | PeerMisbehaved::NoWindow { .. })
            }),
            Self::UnknownOpcode(_) => {
                matches!(error, Protocol::InvalidMessage(InvalidMessage::UnknownOpcode { .. }))
            }
            // The flush of the victim's own work may arrive before its cause.
            Self::Length(33..) => {
                matches!(error, Protocol::InvalidMessage(InvalidMessage::TooLong) | Protocol::Transport(_))
            }
            Self::Length(_) => matches!(error, Protocol::InvalidMessage(InvalidMessage::Length { .. })),
            Self::EmptyWindow => misbehaved(|m| *m == PeerMisbehaved::EmptyWindow),
            Self::HugeWindow => {
                matches!(error, Protocol::PeerIncompatible(PeerIncompatible::WindowTooLarge { .. }))
            }
            Self::WrappedWindow => misbehaved(|m| matches!(m, PeerMisbehaved::WindowWraps { .. })),
            Self::BogusKey => {
                // Or nothing was written: a rogue's receives are never proven.
                matches!(error, Protocol::Transport(_)) || misbehaved(|m| *m == PeerMisbehaved::WindowRefused)
            }
            Self::EarlyRegistration | Self::WindowsWithoutEnd => {
                misbehaved(|m| matches!(m, PeerMisbehaved::EarlyRegistration { .. }))
            }
            Self::UnaskedFeatures => misbehaved(|m| *m == PeerMisbehaved::UnaskedFeatures),
            Self::ServerSends => misbehaved(|m| matches!(m, PeerMisbehaved::ServerSent { .. })),
            Self::FeatureFlood => misbehaved(|m| *m == PeerMisbehaved::FeatureFlood),
            // On a device that flushes late, the disconnect arrives first.
            Self::WriteOutside => {
                matches!(error, Protocol::Transport(_))
                    || misbehaved(|m| *m == PeerMisbehaved::ReachedOutside)
            }
            Self::Silence => {
                matches!(error, Protocol::Transport(_))
                    || misbehaved(|m| matches!(m, PeerMisbehaved::NeverRegistered { .. }))
            }
            Self::Deaf | Self::Starving | Self::Vanish | Self::Odd | Self::ReadWindow | Self::Trespass => {
                matches!(error, Protocol::Transport(_)) || misbehaved(|_| true)
            }
            Self::WithdrawWindow | Self::NeverReady => true,
        }
    }

    /// Sets the client up so that this is a deviation for it.
    pub const fn prepare(self, victim: &mut Config) {
        if matches!(self, Self::UnaskedFeatures) {
            // It must not ask: not for features, nor for proof (docs/decisions.md, 6).
            victim.negotiate = false;
            victim.peer_receives = 64;
        }
    }

    /// Returns whether the victim is certain to notice, if the script was executed completely.
    pub const fn is_fatal(self) -> bool {
        !matches!(
            self,
            Self::Silence | Self::Deaf | Self::Starving | Self::Vanish | Self::WithdrawWindow | Self::Odd
                // Only a victim that writes or posts notices these.
                | Self::BogusKey | Self::WriteOutside | Self::ReadWindow | Self::Trespass
        )
    }
}
