/// Returns the requirement ids in a text, in order; `…-004 to 006` stands for all three.
pub fn ids(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let starts = |prefix| move |(start, _)| (start, prefix);
    let mut mentions: Vec<_> = text.match_indices("VR-").map(starts("VR")).collect();
    mentions.extend(text.match_indices("VS-").map(starts("VS")));
    mentions.sort_unstable();
    for (start, prefix) in mentions {
        let rest = text.get(start + 3..).unwrap_or_default();
        let Some((area, rest)) = rest.split_once('-') else { continue };
        let Some((first, rest)) = number(rest) else { continue };
        if area.is_empty() || !area.chars().all(|c| c.is_ascii_uppercase()) {
            continue;
        }
        let last = rest.strip_prefix(" to ").and_then(number).map_or(first, |(last, _)| last);
        found.extend((first..=last).map(|number| format!("{prefix}-{area}-{number:03}")));
    }
    found
}

fn number(text: &str) -> Option<(u16, &str)> {
    let (digits, rest) = text.split_at_checked(3)?;
    let is_longer = rest.starts_with(|c: char| c.is_ascii_digit());
    if is_longer { None } else { Some((digits.parse().ok()?, rest)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_alone_in_ranges_and_not() {
        let area = |number| format!("VR-{}-{number}", "MEM");
        assert_eq!(ids(&format!("({}).", area("004"))), [area("004")]);
        assert_eq!(ids(&format!("{} to 006, x", area("004"))), ["004", "005", "006"].map(area));
        assert_eq!(ids(&format!("{} and {}", area("004"), area("009"))), ["004", "009"].map(area));
        let snapshot = |number| format!("VS-{}-{number}", "READ");
        assert_eq!(ids(&format!("{} {}", snapshot("001"), area("002"))), [snapshot("001"), area("002")]);
        for none in ["", "VR-", "VR-MEM", "VR-MEM-", "VR-MEM-04", "VR-MEM-0004", "VR-mem-004", "VR--004"] {
            assert_eq!(ids(none), [""; 0], "{none}");
        }
    }
}
