# What lab/run bench measured, as tables and, in the file `json`, as JSON: medians over the repeats, and quotients with the least and the
# greatest of them. Reads its bench.csv, then its controls.csv.
function sort(list, count,    i, j, swap) {
    for (i = 1; i <= count; i++) for (j = i + 1; j <= count; j++) if (list[j] < list[i]) { swap = list[i]; list[i] = list[j]; list[j] = swap }
}
function median(list, count) {
    sort(list, count)
    return count % 2 ? list[(count + 1) / 2] : (list[count / 2] + list[count / 2 + 1]) / 2
}
function middle(row, whose,    i) {
    for (i = 1; i <= count[row, whose]; i++) list[i] = value[row, whose, i] + 0
    return median(list, count[row, whose])
}
# The quotient of the repeats with each other, in `q`, `least` and `greatest`.
function divide(row, whose, by,    i, n) {
    n = count[row, whose]
    for (i = 1; i <= n; i++) list[i] = value[row, whose, i] / value[row, by, i]
    q = median(list, n)
    least = list[1]
    greatest = list[n]
}
function cell(row, whose, by) {
    divide(row, whose, by)
    return sprintf("%.0f | %.2f (%.2f–%.2f)", middle(row, whose), q, least, greatest)
}
function object(row, whose, by) {
    divide(row, whose, by)
    return sprintf("{\"rps\":%.2f,\"quotient\":%.3f,\"least\":%.3f,\"greatest\":%.3f}", middle(row, whose), q, least, greatest)
}
FNR == 1 { file++; next }
file == 1 {
    row = $1 "," $2 "," $3 "," $4
    if (!(row in seen)) { seen[row] = 1; rows[++all] = row }
    value[row, $5, ++count[row, $5]] = $6
}
file == 2 {
    if (!($1 in bytes)) { bytes[$1] = $2; unit[$1] = $3; names[++controls] = $1 }
    # Gigabits a second as mebibytes.
    figure = $3 == "Gb/s" ? $4 * 1e9 / 8 / 1048576 : $4
    if ($3 == "Gb/s") unit[$1] = "MiB/s"
    value["control", $1, ++count["control", $1]] = figure
}
END {
    inside = count[rows[1], "module"]
    print "| test | bytes | clients | pipeline | Valkey, valkey-benchmark | our client | divided | our server | divided |" \
        (inside ? " our module | divided | our library | divided | both | divided |" : "")
    print "|---|--:|--:|--:|--:|--:|--:|--:|--:|" (inside ? "--:|--:|--:|--:|--:|--:|" : "")
    printf "{\"rdma\":[" >json
    for (r = 1; r <= all; r++) if (count[row = rows[r], "theirs"]) {
        name = row
        gsub(",", " | ", name)
        printf "| %s | %.0f | %s | %s |", name, middle(row, "theirs"), cell(row, "client", "theirs"), cell(row, "server", "theirs")
        if (inside) printf " %s | %s | %s |", cell(row, "module", "theirs"), cell(row, "library", "theirs"), cell(row, "both", "theirs")
        print ""
        split(row, part, ",")
        printf "%s\n{\"test\":\"%s\",\"bytes\":%d,\"clients\":%d,\"pipeline\":%d,\"valkey\":%.2f,\"client\":%s,\"server\":%s", comma, part[1],
            part[2], part[3], part[4], middle(row, "theirs"), object(row, "client", "theirs"), object(row, "server", "theirs") >json
        if (inside) printf ",\"module\":%s,\"library\":%s,\"both\":%s", object(row, "module", "theirs"), object(row, "library", "theirs"), object(row, "both", "theirs") >json
        printf "}" >json
        comma = ","
    }
    print "\n| over TCP | bytes | clients | pipeline | valkey-benchmark | valkey-rdma-bench | divided |"
    print "|---|--:|--:|--:|--:|--:|--:|"
    printf "],\n\"tcp\":[" >json
    comma = ""
    for (r = 1; r <= all; r++) if (count[row = rows[r], "tcp"]) {
        name = row
        gsub(",", " | ", name)
        printf "| %s | %.0f | %s |\n", name, middle(row, "tcp"), cell(row, "tcp-client", "tcp")
        split(row, part, ",")
        printf "%s\n{\"test\":\"%s\",\"bytes\":%d,\"clients\":%d,\"pipeline\":%d,\"valkey\":%.2f,\"client\":%s}", comma, part[1], part[2],
            part[3], part[4], middle(row, "tcp"), object(row, "tcp-client", "tcp") >json
        comma = ","
    }
    print "\n| test | bytes | clients | pipeline | one thread of kv_server | two | divided |"
    print "|---|--:|--:|--:|--:|--:|--:|"
    printf "],\n\"threads\":[" >json
    comma = ""
    for (r = 1; r <= all; r++) if (count[row = rows[r], "one-thread"]) {
        name = row
        gsub(",", " | ", name)
        printf "| %s | %.0f | %s |\n", name, middle(row, "one-thread"), cell(row, "two-threads", "one-thread")
        split(row, part, ",")
        printf "%s\n{\"test\":\"%s\",\"bytes\":%d,\"clients\":%d,\"pipeline\":%d,\"one\":%.2f,\"two\":%s}", comma, part[1], part[2],
            part[3], part[4], middle(row, "one-thread"), object(row, "two-threads", "one-thread") >json
        comma = ","
    }
    print "\n| control | bytes | | of ib_write_bw |"
    print "|---|--:|--:|--:|"
    printf "],\n\"controls\":[" >json
    comma = ""
    for (c = 1; c <= controls; c++) {
        name = names[c]
        shown = name
        gsub("_", " ", shown)
        m = middle("control", name)
        quotient = "–"
        rest = ""
        if (unit[name] == "MiB/s") {
            divide("control", name, "ib_write_bw")
            quotient = sprintf("%.2f (%.2f–%.2f)", q, least, greatest)
            rest = sprintf(",\"quotient\":%.3f,\"least\":%.3f,\"greatest\":%.3f", q, least, greatest)
        }
        printf "| %s | %d | %.1f %s | %s |\n", name ~ /^stream/ ? shown : name, bytes[name], m, unit[name], quotient
        printf "%s\n{\"what\":\"%s\",\"bytes\":%d,\"unit\":\"%s\",\"median\":%.2f%s}", comma, name, bytes[name], unit[name], m, rest >json
        comma = ","
    }
    print "]}" >json
}
