//! What a case is.

use rdma_conn::Descriptors;

use super::context::Context;
use super::verdict::Judged;
use crate::reqs::Requirements;
pub use crate::reqs::{Level, Profile, Role};

/// What whoever selects cases may want to know about one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// May bring down a target that is not made for it, or degrade it for others.
    Disruptive,
    /// Takes seconds.
    Slow,
    /// Looks at the target's process, which must run here.
    Local,
}

impl Tag {
    /// As it is written everywhere.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disruptive => "disruptive",
            Self::Slow => "slow",
            Self::Local => "local",
        }
    }
}

/// A case: how the target of one role takes one thing.
pub struct Case<B: Descriptors> {
    /// `area.intent`, the same for both roles.
    pub id: &'static str,
    /// Who is tested.
    pub role: Role,
    /// What the target is shown.
    pub intent: &'static str,
    /// What it has to make of it.
    pub expectation: &'static str,
    /// The requirements it is about, the one that matters most first.
    pub requirements: &'static [&'static str],
    /// More about it.
    pub tags: &'static [Tag],
    /// The case itself.
    pub run: fn(&Context<'_, B>) -> Judged,
}

impl<B: Descriptors> Case<B> {
    /// How binding it is: as its first requirement.
    pub fn level(&self, requirements: &Requirements) -> Level {
        let first = self.requirements.first();
        first.and_then(|id| requirements.get(id)).map_or(Level::May, |requirement| requirement.level)
    }

    /// What it is for: as its first requirement.
    pub fn profile(&self, requirements: &Requirements) -> Option<Profile> {
        requirements.get(self.requirements.first()?).map(|requirement| requirement.profile)
    }

    /// Whether it has this tag.
    pub fn is(&self, tag: Tag) -> bool {
        self.tags.contains(&tag)
    }

    /// Its area: the first part of its id.
    pub fn area(&self) -> &'static str {
        self.id.split('.').next().unwrap_or_default()
    }
}

/// As it is written everywhere.
pub const fn role_name(role: Role) -> &'static str {
    match role {
        Role::Client => "client",
        Role::Server => "server",
    }
}

/// A list of cases, in lines of: who is tested (`server`, `client` or `both`), the id, what the target is shown, what it
/// has to make of it, the requirements, tags, and the body, a `fn(&Context<B>) -> Judged`.
macro_rules! cases {
    ($($who:ident $id:literal, $intent:literal => $expectation:literal,
       [$($requirement:literal),+] $([$($tag:ident),+])?, $body:expr;)+) => {{
        let mut cases = Vec::new();
        $(for role in $crate::blackbox::case::roles(stringify!($who)) {
            cases.push($crate::blackbox::case::Case {
                id: $id,
                role: *role,
                intent: $intent,
                expectation: $expectation,
                requirements: &[$($requirement),+],
                tags: &[$($($crate::blackbox::case::Tag::$tag),+)?],
                run: $body,
            });
        })+
        cases
    }};
}

/// The roles that a line of `cases!` is for.
pub(super) fn roles(who: &str) -> &'static [Role] {
    match who {
        "server" => &[Role::Server],
        "client" => &[Role::Client],
        _ => &[Role::Server, Role::Client],
    }
}
