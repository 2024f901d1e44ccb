//! The requirements as one readable page.

use std::fmt::Write;

use super::{Requirement, Requirements, Role};

const AREAS: [(&str, &str); 10] = [
    ("CTRL", "Control messages"),
    ("FEAT", "Features"),
    ("MEM", "Windows"),
    ("XFER", "Transfer"),
    ("FLOW", "Flow control"),
    ("CONN", "Connection"),
    ("KEEP", "Keepalive"),
    ("CLOSE", "Close"),
    ("RES", "Resources"),
    ("SEC", "Security"),
];

/// The page, in Markdown.
pub fn page(requirements: &Requirements) -> String {
    let mut page = String::from(
        "# Requirements\n\n\
         Rendered from [requirements.toml](requirements.toml) by `valkey-rdma-conformance reqs render`; change that file.\n\
         [protocol.md](protocol.md) tells the same in order. What shows each requirement: `valkey-rdma-conformance reqs coverage`.\n\n\
         | area | must | should | may |\n|---|---:|---:|---:|\n",
    );
    for (area, title) in AREAS {
        let count = |level: &str| {
            requirements.iter().filter(|one| one.area() == area && one.level.to_string() == level).count()
        };
        let link = title.to_lowercase().replace(' ', "-");
        let [must, should, may] = ["must", "should", "may"].map(count);
        let _ = writeln!(page, "| [{title}](#{link}) | {must} | {should} | {may} |");
    }
    for (area, title) in AREAS {
        let _ = writeln!(page, "\n## {title}");
        for requirement in requirements.iter().filter(|requirement| requirement.area() == area) {
            add(&mut page, requirement);
        }
    }
    page
}

fn add(page: &mut String, requirement: &Requirement) {
    let Requirement { id, level, origin, source, text, note, roles, untestable, .. } = requirement;
    let whom = match roles[..] {
        [Role::Client] => ", clients",
        [Role::Server] => ", servers",
        _ => "",
    };
    let _ = write!(page, "\n### {id}\n**{level}**{whom} · {origin}: {source}\n\n{text}\n");
    for (title, more) in [("Note", note), ("Not tested", untestable)] {
        if let Some(more) = more {
            let _ = write!(page, "\n> {title}: {more}\n");
        }
    }
}
