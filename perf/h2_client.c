/* A gRPC client for measurements: one connection, one thread, HTTP/2 frames by hand (RFC 9113, RFC 7541).
 *
 *   h2_client send    HOST PORT PATH FILE COUNT IN_FLIGHT      unary calls; FILE holds the framed message
 *   h2_client consume HOST PORT FILE SUBSCRIPTION COUNT        ReceiveMessages (FILE: framed ReceiveRequest),
 *                                                              one Ack call for each message, COUNT of them
 *
 * With DANUBE_TOKEN in the environment each call of `send` bears it.
 *
 * Each role prints one line of JSON.  A call counts as "ok" when its trailers hold grpc-status 0 as plain
 * text, as Danube writes them; other servers may compress it, and then only "ended" means something.  The
 * process ends with 1 and a sentence on stderr when the server does what a measurement cannot use.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { DATA = 0, HEADERS = 1, RST_STREAM = 3, SETTINGS = 4, PING = 6, GOAWAY = 7, WINDOW_UPDATE = 8 };
enum { END_STREAM = 1, ACKNOWLEDGE = 1, END_HEADERS = 4, PADDED = 8, PRIORITY = 32 };
enum { FRAME_HEAD = 9, INPUT_BYTES = 1 << 20, OUTPUT_BYTES = 4 << 20, BLOCK_BYTES = 1024, SILENCE_MS = 20000 };
enum { STREAM_WINDOW = 4 << 20, CONNECTION_WINDOW = 16 << 20, MESSAGE_BYTES = 16 << 20, ID_BYTES = 512 };
#define OK_TRAILER "grpc-status\x01" "0"

struct block { uint8_t bytes[BLOCK_BYTES]; size_t size; };
struct ack { uint16_t size; uint8_t id[ID_BYTES]; };

static int sock;
static uint8_t input[INPUT_BYTES], output[OUTPUT_BYTES];
static size_t input_end, output_start, output_end;
static int64_t send_window = 65535;
static uint64_t peer_streams = 100, consumed_connection, consumed_stream;
static uint32_t next_stream = 1;
static uint64_t ok, ended, started_ns, ended_ns, *moments;
static struct block first_block, later_block;
static char refusal[300]; /* what can be read of the first trailers that were not OK */

/* consume */
static int consuming, ack_block_sent;
static struct ack *queue;
static size_t queue_start, queue_end, queue_room;
static uint8_t *message;
static size_t message_size;
static uint64_t received, in_flight;
static const char *subscription;

static _Noreturn void fail(const char *what, long number) {
    fprintf(stderr, "h2_client: %s (%ld)\n", what, number);
    exit(1);
}

static uint64_t now_ns(void) {
    struct timespec moment;
    clock_gettime(CLOCK_MONOTONIC, &moment);
    return (uint64_t)moment.tv_sec * 1000000000u + (uint64_t)moment.tv_nsec;
}

static uint32_t read32(const uint8_t *at) { return (uint32_t)at[0] << 24 | at[1] << 16 | at[2] << 8 | at[3]; }

static void write32(uint8_t *at, uint32_t value) { value = htonl(value), memcpy(at, &value, 4); }

static size_t write_varint(uint8_t *at, uint64_t value) {
    size_t size = 0;
    for (; value > 127; value >>= 7) at[size++] = (uint8_t)(value | 128);
    at[size++] = (uint8_t)value;
    return size;
}

static size_t read_varint(const uint8_t *at, const uint8_t *end, uint64_t *value) {
    *value = 0;
    for (size_t size = 0; at + size < end && size < 10; size++) {
        *value |= (uint64_t)(at[size] & 127) << (7 * size);
        if (at[size] < 128) return size + 1;
    }
    fail("a message ends inside a number", 0);
    return 0;
}

/* -- output ------------------------------------------------------------------------------------------- */

static uint8_t *room(size_t size) {
    if (output_end + size > OUTPUT_BYTES) {
        memmove(output, output + output_start, output_end - output_start);
        output_end -= output_start, output_start = 0;
        if (output_end + size > OUTPUT_BYTES) fail("the server does not read", (long)output_end);
    }
    uint8_t *at = output + output_end;
    output_end += size;
    return at;
}

static void put_frame(int type, int flags, uint32_t stream, const void *payload, size_t size) {
    uint8_t *at = room(FRAME_HEAD + size);
    at[0] = (uint8_t)(size >> 16), at[1] = (uint8_t)(size >> 8), at[2] = (uint8_t)size;
    at[3] = (uint8_t)type, at[4] = (uint8_t)flags;
    write32(at + 5, stream);
    if (size) memcpy(at + FRAME_HEAD, payload, size);
}

static void put_window_update(uint32_t stream, uint32_t size) {
    uint8_t payload[4];
    write32(payload, size);
    put_frame(WINDOW_UPDATE, 0, stream, payload, 4);
}

static void write_output(void) {
    while (output_start < output_end) {
        ssize_t size = send(sock, output + output_start, output_end - output_start, MSG_NOSIGNAL);
        if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (size < 0) fail("the connection broke while sending", errno);
        output_start += (size_t)size;
    }
    output_start = output_end = 0;
}

/* -- header blocks ------------------------------------------------------------------------------------ */

static void add_string(struct block *block, const char *text) {
    size_t size = strlen(text), rest = size - 127; /* 7 bits hold a length below 127: RFC 7541, 5.1 */
    if (size > BLOCK_BYTES) fail("a header is too long for this client", (long)size);
    block->bytes[block->size++] = (uint8_t)(size < 127 ? size : 127);
    for (; size >= 127 && rest >= 128; rest >>= 7) block->bytes[block->size++] = (uint8_t)(rest | 128);
    if (size >= 127) block->bytes[block->size++] = (uint8_t)rest;
    memcpy(block->bytes + block->size, text, size);
    block->size += size;
}

/* Literals with indexing; afterwards te, content-type, authority and path are 62 to 65, behind a token 63 to 66. */
static void make_blocks(const char *path, const char *authority) {
    static const uint8_t later[] = {0xC2, 0xC1, 0xC0, 0xBF, 0xBE};
    const char *token = getenv("DANUBE_TOKEN");
    char bearer[BLOCK_BYTES];
    struct block *block = &first_block;
    block->bytes[block->size++] = 0x83; /* :method POST */
    block->bytes[block->size++] = 0x86; /* :scheme http */
    block->bytes[block->size++] = 0x44;
    add_string(block, path);
    block->bytes[block->size++] = 0x41;
    add_string(block, authority);
    block->bytes[block->size++] = 0x5F;
    add_string(block, "application/grpc");
    block->bytes[block->size++] = 0x40;
    add_string(block, "te");
    add_string(block, "trailers");
    if (token) {
        if (snprintf(bearer, sizeof bearer, "Bearer %s", token) >= (int)sizeof bearer)
            fail("the token is too long for this client", (long)strlen(token));
        block->bytes[block->size++] = 0x57; /* authorization */
        add_string(block, bearer);
    }
    later_block.size = 2 + sizeof later - !token;
    memcpy(later_block.bytes, block->bytes, 2);
    memcpy(later_block.bytes + 2, later + !token, sizeof later - !token);
}

/* The first Ack puts its path into the table: path 62, te 63, content-type 64, authority 65. */
static void put_ack_headers(uint32_t stream) {
    static const uint8_t later[] = {0x83, 0x86, 0xBE, 0xC1, 0xC0, 0xBF};
    if (ack_block_sent) {
        put_frame(HEADERS, END_HEADERS, stream, later, sizeof later);
        return;
    }
    struct block block = {.size = 3};
    block.bytes[0] = 0x83, block.bytes[1] = 0x86, block.bytes[2] = 0x44;
    add_string(&block, "/danube.ConsumerService/Ack");
    memcpy(block.bytes + block.size, later + 3, 3);
    put_frame(HEADERS, END_HEADERS, stream, block.bytes, block.size + 3);
    ack_block_sent = 1;
}

/* -- consume ------------------------------------------------------------------------------------------ */

/* Keep the bytes of msg_id (field 2), which an AckRequest gives back as they are. */
static void take_message(const uint8_t *at, size_t size) {
    const uint8_t *end = at + size;
    uint64_t key, length;
    received++;
    if (received == 1) started_ns = now_ns();
    while (at < end) {
        at += read_varint(at, end, &key);
        if ((key & 7) == 0) {
            at += read_varint(at, end, &length);
            continue;
        }
        if ((key & 7) != 2) fail("a StreamMessage with a strange field", (long)key);
        at += read_varint(at, end, &length);
        if (length > (uint64_t)(end - at)) fail("a StreamMessage is cut", (long)length);
        if (key >> 3 == 2) {
            if (length > ID_BYTES) fail("a msg_id is too long for this client", (long)length);
            if (queue_end == queue_room) {
                memmove(queue, queue + queue_start, (queue_end - queue_start) * sizeof *queue);
                queue_end -= queue_start, queue_start = 0;
                if (queue_end == queue_room) fail("the server takes no acks", (long)queue_end);
            }
            queue[queue_end].size = (uint16_t)length;
            memcpy(queue[queue_end++].id, at, length);
            return;
        }
        at += length;
    }
    fail("a StreamMessage without msg_id", 0);
}

static void take_data(const uint8_t *data, size_t size) {
    if (message_size + size > MESSAGE_BYTES) fail("a message is too long for this client", (long)size);
    memcpy(message + message_size, data, size);
    message_size += size;
    size_t start = 0;
    while (message_size - start >= 5) {
        size_t length = read32(message + start + 1);
        if (message[start]) fail("a compressed message", message[start]);
        if (message_size - start - 5 < length) break;
        take_message(message + start + 5, length);
        start += 5 + length;
    }
    memmove(message, message + start, message_size - start);
    message_size -= start;
}

static void put_acks(void) {
    uint8_t body[ID_BYTES + 256];
    size_t name_size = strlen(subscription);
    while (queue_start < queue_end && in_flight < peer_streams && send_window >= (int64_t)sizeof body) {
        struct ack *ack = &queue[queue_start++];
        size_t size = 5;
        body[size++] = 0x08;
        size += write_varint(body + size, next_stream);
        body[size++] = 0x12;
        size += write_varint(body + size, ack->size);
        memcpy(body + size, ack->id, ack->size);
        size += ack->size;
        body[size++] = 0x1A;
        size += write_varint(body + size, name_size);
        memcpy(body + size, subscription, name_size);
        size += name_size;
        body[0] = 0;
        write32(body + 1, (uint32_t)(size - 5));
        put_ack_headers(next_stream);
        put_frame(DATA, END_STREAM, next_stream, body, size);
        send_window -= (int64_t)size;
        next_stream += 2;
        in_flight++;
    }
}

/* -- input -------------------------------------------------------------------------------------------- */

static void take_settings(const uint8_t *at, size_t size) {
    for (; size >= 6; at += 6, size -= 6) {
        int name = at[0] << 8 | at[1];
        if (name == 3) peer_streams = read32(at + 2);
    }
    put_frame(SETTINGS, ACKNOWLEDGE, 0, NULL, 0);
}

static void give_windows(uint32_t stream, size_t size) {
    consumed_connection += size;
    if (consumed_connection > CONNECTION_WINDOW / 2) {
        put_window_update(0, (uint32_t)consumed_connection);
        consumed_connection = 0;
    }
    if (!consuming || stream != 1) return;
    consumed_stream += size;
    if (consumed_stream > STREAM_WINDOW / 2) {
        put_window_update(1, (uint32_t)consumed_stream);
        consumed_stream = 0;
    }
}

static void call_ended(uint32_t stream, const uint8_t *block, size_t size) {
    ended++, in_flight--;
    if (block && memmem(block, size, OK_TRAILER, sizeof OK_TRAILER - 1)) {
        ok++;
    } else if (!refusal[0]) {
        for (size_t at = 0; block && at < size && at + 1 < sizeof refusal; at++)
            refusal[at] = block[at] >= 32 && block[at] < 127 && block[at] != '"' && block[at] != '\\' ? (char)block[at] : ' ';
    }
    ended_ns = now_ns();
    if (moments) moments[(stream - 1) / 2] = ended_ns - moments[(stream - 1) / 2];
}

static void take_frame(int type, int flags, uint32_t stream, const uint8_t *at, size_t size) {
    if ((type == HEADERS || type == DATA) && flags & (PADDED | PRIORITY)) fail("a padded frame", type);
    if (type == HEADERS && !(flags & END_HEADERS)) fail("a header block in several frames", stream);
    switch (type) {
    case DATA:
        give_windows(stream, size);
        if (consuming && stream == 1) take_data(at, size);
        break;
    case SETTINGS:
        if (!(flags & ACKNOWLEDGE)) take_settings(at, size);
        break;
    case PING:
        if (!(flags & ACKNOWLEDGE)) put_frame(PING, ACKNOWLEDGE, 0, at, size);
        break;
    case WINDOW_UPDATE:
        if (stream == 0) send_window += read32(at);
        break;
    case RST_STREAM:
        fail("the server reset a stream", read32(at));
    case GOAWAY:
        fail("the server said goodbye", size >= 8 ? (long)read32(at + 4) : -1);
    }
    if ((type == HEADERS || type == DATA) && flags & END_STREAM) {
        if (consuming && stream == 1) fail("the server ended ReceiveMessages", (long)received);
        call_ended(stream, type == HEADERS ? at : NULL, size);
    }
}

static void read_input(void) {
    ssize_t size = recv(sock, input + input_end, INPUT_BYTES - input_end, 0);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size <= 0) fail("the connection ended", size < 0 ? errno : 0);
    input_end += (size_t)size;
    size_t start = 0;
    while (input_end - start >= FRAME_HEAD) {
        const uint8_t *head = input + start;
        size_t length = (size_t)head[0] << 16 | (size_t)head[1] << 8 | head[2];
        if (length + FRAME_HEAD > INPUT_BYTES) fail("a frame is too long", (long)length);
        if (input_end - start < FRAME_HEAD + length) break;
        take_frame(head[3], head[4], read32(head + 5) & 0x7fffffff, head + FRAME_HEAD, length);
        start += FRAME_HEAD + length;
    }
    memmove(input, input + start, input_end - start);
    input_end -= start;
}

static void turn(void) {
    struct pollfd wait = {.fd = sock, .events = POLLIN};
    write_output();
    if (output_start < output_end) wait.events |= POLLOUT;
    int found = poll(&wait, 1, SILENCE_MS);
    if (found < 0 && errno == EINTR) return;
    if (found <= 0) fail("the server is silent; calls that ended", (long)ended);
    if (wait.revents & (POLLIN | POLLHUP | POLLERR)) read_input();
}

/* -- roles -------------------------------------------------------------------------------------------- */

static void open_socket(const char *host, const char *port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
    int one = 1;
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) fail("the host must be an IPv4 address", 0);
    sock = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(sock, (struct sockaddr *)&address, sizeof address)) fail("cannot connect", errno);
    setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(sock, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5);
    fcntl(sock, F_SETFL, O_NONBLOCK);
}

static void open_http2(const char *host, const char *port, const char *path) {
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    uint8_t settings[6] = {0, 4};
    char authority[64];
    open_socket(host, port);
    memcpy(room(sizeof preface - 1), preface, sizeof preface - 1);
    write32(settings + 2, STREAM_WINDOW);
    put_frame(SETTINGS, 0, 0, settings, sizeof settings);
    put_window_update(0, CONNECTION_WINDOW - 65535);
    snprintf(authority, sizeof authority, "%s:%s", host, port);
    make_blocks(path, authority);
}

static uint8_t *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file) fail("cannot open the file with the message", errno);
    uint8_t *found = malloc(1 << 20);
    *size = fread(found, 1, 1 << 20, file);
    fclose(file);
    return found;
}

static int by_size(const void *left, const void *right) {
    uint64_t one = *(const uint64_t *)left, other = *(const uint64_t *)right;
    return (one > other) - (one < other);
}

static void print_moments(uint64_t count) {
    qsort(moments, count, sizeof *moments, by_size);
    printf("\"p50_us\": %.1f, \"p99_us\": %.1f, \"max_us\": %.1f, ", (double)moments[count / 2] / 1000,
           (double)moments[count * 99 / 100] / 1000, (double)moments[count - 1] / 1000);
}

static void print_result(uint64_t count) {
    printf("\"refusal\": \"%s\", ", refusal);
    printf("\"records\": %lu, \"ok\": %lu, \"ended\": %lu, \"started_ns\": %lu, \"ended_ns\": %lu}\n",
           (unsigned long)count, (unsigned long)ok, (unsigned long)ended, (unsigned long)started_ns,
           (unsigned long)ended_ns);
}

static void send_calls(const char *path, uint64_t count, uint64_t in_flight_max) {
    size_t size;
    uint8_t *body = read_file(path, &size);
    moments = calloc(count, sizeof *moments);
    uint64_t sent = 0;
    while (ended < count) {
        while (sent < count && in_flight < in_flight_max && in_flight < peer_streams &&
               send_window >= (int64_t)size) {
            struct block *block = sent ? &later_block : &first_block;
            put_frame(HEADERS, END_HEADERS, next_stream, block->bytes, block->size);
            put_frame(DATA, END_STREAM, next_stream, body, size);
            send_window -= (int64_t)size;
            moments[sent] = now_ns();
            if (!sent++) started_ns = moments[0];
            next_stream += 2, in_flight++;
        }
        turn();
    }
    printf("{");
    print_moments(count);
    print_result(count);
}

static void consume(const char *path, const char *name, uint64_t count) {
    size_t size;
    uint8_t *body = read_file(path, &size);
    if (strlen(name) > 127) fail("the subscription's name is too long for this client", (long)strlen(name));
    subscription = name;
    consuming = 1;
    queue_room = count + 1;
    queue = malloc(queue_room * sizeof *queue);
    message = malloc(MESSAGE_BYTES);
    if (!queue || !message) fail("out of memory", 0);
    put_frame(HEADERS, END_HEADERS, 1, first_block.bytes, first_block.size);
    put_frame(DATA, END_STREAM, 1, body, size);
    next_stream = 3, in_flight = 1; /* ReceiveMessages itself */
    while (ended < count) {
        put_acks();
        turn();
    }
    printf("{\"received\": %lu, ", (unsigned long)received);
    print_result(count);
}

int main(int count, char **words) {
    if (count == 8 && !strcmp(words[1], "send")) {
        open_http2(words[2], words[3], words[4]);
        send_calls(words[5], strtoull(words[6], NULL, 10), strtoull(words[7], NULL, 10));
    } else if (count == 7 && !strcmp(words[1], "consume")) {
        open_http2(words[2], words[3], "/danube.ConsumerService/ReceiveMessages");
        consume(words[4], words[5], strtoull(words[6], NULL, 10));
    } else {
        fail("see the top of h2_client.c for its roles", count);
    }
    return 0;
}
