//! What a connection that nothing befell owes to its two programs.

use super::app::{End, Ending, How};
use super::oracle::Violation;
use super::scenario::Dialogue;

/// Whether both programs got what they were promised.
///
/// # Errors
/// The promise that was broken.
pub fn judge(place: usize, dialogue: &Dialogue, client: &Ending, server: &Ending) -> Result<(), Violation> {
    let sides = [("client", client, &dialogue.client, server), ("server", server, &dialogue.server, client)];
    let dropped = sides.iter().any(|(_, _, habits, _)| matches!(habits.end, End::Drop { .. }));
    for (name, ending, habits, peer) in sides {
        // A server that has nothing to say and leaves at once may leave before its window is known, which is all that
        // its client waits for.
        let left_at_once = peer.written == 0 && ending.read == 0 && matches!(peer.how, How::Own);
        if let How::Failed(error) = &ending.how
            && !dropped
            && !left_at_once
        {
            return Err(Violation::new(
                "no cause",
                format!("connection {place}: the {name} failed without a cause: {error}"),
            ));
        }
        let lost = ending.delivered && peer.read < ending.written && matches!(peer.how, How::Eof);
        // Whoever waits for the end reads everything there is; whoever closes early does not look.
        if lost {
            return Err(Violation::new(
                "delivery",
                format!(
                    "connection {place}: the {name} closed with {} bytes delivered, its peer read {} and then the end",
                    ending.written, peer.read
                ),
            ));
        }
        if matches!(habits.end, End::Close { reads_first: true }) && !dropped && peer.read < habits.bytes {
            return Err(Violation::new(
                "delivery",
                format!(
                    "connection {place}: the {name} closed and only {} of {} bytes were delivered",
                    peer.read, habits.bytes
                ),
            ));
        }
    }
    Ok(())
}
