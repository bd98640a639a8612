/* A load generator for OpenAI-compatible gateways: HTTP/1.1, one thread, epoll; reads SSE and judges every answer.
 *
 *   load --port P --bodies FILE [options]          (see usage() for the options)
 *
 * Closed loop: each connection sends its next request when the last one is answered. Open loop (--rate): request i is due
 * at start + i / rate, and its latency counts from then, whether or not a connection was free: a stall is charged to every
 * request that it delays (no coordinated omission).
 * Warm-up requests are finished before the measurement starts, and `{"event":"measuring"}` is printed between the two; with
 * --wait, another process can then take its own readings and let the measurement begin. The result is printed after the
 * last request has ended. Only loopback addresses are accepted; time and count are bounded.
 *
 * Knows nothing of gateways: it compares nothing and starts nothing.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "http1.h"

#define CONNECTIONS_MAX 4096
#define DURATION_S_MAX 3600
#define COUNT_MAX 20000000
#define READ_BYTES 262144
#define LINE_BYTES 24
#define UNIQUE "@@@@@@@@@@@@@@@@" /* in a body: replaced by 16 hexadecimal digits that no other request of this run has */
#define TALLY_MAX 16

typedef enum { CLOSED, CONNECTING, IDLE, BUSY } State;
typedef enum { E_CONNECT, E_STATUS, E_SHORT, E_CUT, E_ERROR_EVENT, E_TIMEOUT, E_UNSENT, ERROR_KINDS } Error;
static const char *const ERROR_NAMES[] = {"connect", "status", "short", "cut", "error_event", "timeout", "unsent"};

typedef struct {
  char *data;
  size_t size;
  long unique_at; /* offset of UNIQUE in data, or -1 */
} Body;

typedef struct {
  float *ms;
  size_t count, room;
} Samples;

typedef struct {
  int fd;
  State state;
  Reader reader;
  Buffer out, failure; /* failure: the start of a refused answer's body */
  size_t sent;
  uint64_t due_ns, first_byte_ns, first_event_ns, last_event_ns;
  int events, has_done, has_error_event;
  char line[LINE_BYTES]; /* the start of the current SSE line */
  size_t line_size;
} Connection;

static struct {
  int port, connections, is_stream, is_waiting, events_min;
  const char *path, *tally;
  double duration_s, warmup_s, rate, timeout_s;
  uint64_t count, warmup_count;
  size_t bytes_min;
  Buffer headers;
} options = {.port = 0, .connections = 1, .path = "/v1/chat/completions", .duration_s = 5, .timeout_s = 30, .count = COUNT_MAX};

static struct {
  int epoll, timer;
  Body *bodies;
  size_t body_count;
  uint32_t *order;
  size_t order_size;
  Connection *connections;
  int busy, is_measuring;
  uint64_t serial; /* of requests ever sent */
  uint64_t started, limit, start_ns, deadline_ns, last_end_ns, read_ns;
  uint64_t completed, errors[ERROR_KINDS], bytes, events, connects;
  Samples latency, first_byte, first_event, gap;
  struct { char value[48]; uint64_t count; } tally[TALLY_MAX];
  char first_failure[400];
} load;

static void usage(void) {
  die("load --port P --bodies FILE [options]\n"
      "  --bodies FILE      request bodies, one JSON object a line; " UNIQUE " in one becomes a fresh value per request\n"
      "  --order FILE       which body each request takes: 32-bit little-endian indices, repeated; default: in turn\n"
      "  --path PATH        default /v1/chat/completions\n"
      "  --header 'K: V'    may be repeated\n"
      "  --connections N    default 1\n"
      "  --rate R           open loop at R requests/s over at most N connections\n"
      "  --duration S       default 5\n"
      "  --count N          stop after N requests\n"
      "  --warmup S         seconds of closed-loop load that is not measured\n"
      "  --warmup-count N   at most N requests of it\n"
      "  --timeout S        per request, default 30\n"
      "  --stream           answers are event streams; `short` without [DONE]\n"
      "  --events-min N     `short` with fewer events (without --stream: see --bytes-min)\n"
      "  --bytes-min N      `short` with a smaller body\n"
      "  --tally HEADER     count the answers by this header's value, e.g. x-sameway-cache:\n"
      "  --wait             after `measuring`, wait for a line on standard input before the first measured request");
}

/* ---- samples ---- */

static void sample(Samples *s, uint64_t ns) {
  if (!load.is_measuring) return;
  if (s->count == s->room) {
    s->room = s->room ? s->room * 2 : 65536;
    s->ms = realloc(s->ms, s->room * sizeof *s->ms);
    if (!s->ms) die("out of memory");
  }
  s->ms[s->count++] = (float)((double)ns / 1e6);
}

static int by_value(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

static void print_samples(const char *name, Samples *s) {
  if (!s->count) {
    printf(",\"%s\":null", name);
    return;
  }
  static const double ranks[] = {50, 90, 95, 99, 99.9};
  static const char *const names[] = {"p50", "p90", "p95", "p99", "p999"};
  qsort(s->ms, s->count, sizeof *s->ms, by_value);
  double sum = 0;
  for (size_t i = 0; i < s->count; i++) sum += (double)s->ms[i];
  printf(",\"%s\":{\"count\":%zu,\"mean\":%.4f", name, s->count, sum / (double)s->count);
  for (int i = 0; i < 5; i++) {
    size_t at = (size_t)((double)s->count * ranks[i] / 100.0);
    printf(",\"%s\":%.4f", names[i], (double)s->ms[at < s->count ? at : s->count - 1]);
  }
  printf(",\"max\":%.4f}", (double)s->ms[s->count - 1]);
}

static void tally(const Connection *c) {
  const char *value = options.tally ? reader_header(&c->reader, options.tally) : NULL;
  if (!options.tally || !load.is_measuring) return;
  char text[sizeof load.tally[0].value] = "(none)";
  if (value) snprintf(text, sizeof text, "%.*s", (int)strcspn(value, "\r\"\\"), value);
  for (int i = 0; i < TALLY_MAX; i++) {
    if (!load.tally[i].count) strcpy(load.tally[i].value, text);
    if (strcmp(load.tally[i].value, text) != 0) continue;
    load.tally[i].count++;
    return;
  }
}

/* ---- requests and answers ---- */

static void watch(Connection *c, uint32_t events, int operation) {
  struct epoll_event event = {.events = events, .data.ptr = c};
  epoll_ctl(load.epoll, operation, c->fd, &event);
}

static void hang_up(Connection *c) {
  if (c->fd >= 0) close(c->fd);
  c->fd = -1;
  c->state = CLOSED;
}

static void count_error(Connection *c, Error kind) {
  if (!load.is_measuring) return;
  load.errors[kind]++;
  if (load.first_failure[0]) return;
  int size = snprintf(load.first_failure, sizeof load.first_failure, "%s: %.*s ", ERROR_NAMES[kind],
                      (int)strcspn(c->reader.head, "\r"), c->reader.head);
  for (size_t i = 0; i < c->failure.size && (size_t)size < sizeof load.first_failure - 1; i++) {
    char byte = c->failure.data[i]; /* kept printable and free of what JSON would escape */
    load.first_failure[size++] = byte < ' ' || byte == '\\' ? ' ' : byte == '"' ? '\'' : byte;
  }
}

static void end_request(Connection *c, int has_failed, Error kind) {
  load.busy--;
  load.last_end_ns = now_ns();
  if (has_failed) {
    count_error(c, kind);
  } else if (load.is_measuring) {
    load.completed++;
    load.bytes += c->reader.body_bytes;
    load.events += (uint64_t)c->events;
    sample(&load.latency, load.last_end_ns - c->due_ns);
    sample(&load.first_byte, c->first_byte_ns - c->due_ns);
    if (c->first_event_ns) sample(&load.first_event, c->first_event_ns - c->due_ns);
    tally(c);
  }
  c->state = IDLE;
}

static void fail(Connection *c, Error kind) {
  hang_up(c);
  end_request(c, 1, kind);
  c->state = CLOSED;
}

static void write_out(Connection *c) {
  while (c->sent < c->out.size) {
    ssize_t n = send(c->fd, c->out.data + c->sent, c->out.size - c->sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {
      watch(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
      return;
    }
    if (n < 0) {
      fail(c, E_CUT);
      return;
    }
    c->sent += (size_t)n;
  }
}

static void fill_request(Connection *c) {
  size_t turn = load.serial % (load.order_size ? load.order_size : load.body_count);
  const Body *body = &load.bodies[load.order_size ? load.order[turn] : turn];
  c->out.size = c->sent = 0;
  buffer_add(&c->out, options.headers.data, options.headers.size);
  buffer_printf(&c->out, "content-length: %zu\r\n\r\n", body->size);
  size_t start = c->out.size;
  buffer_add(&c->out, body->data, body->size);
  if (body->unique_at >= 0) {
    char digits[17];
    snprintf(digits, sizeof digits, "%016lx", (unsigned long)load.serial);
    memcpy(c->out.data + start + body->unique_at, digits, 16);
  }
  load.serial++;
}

static void dial(Connection *c) {
  struct sockaddr_in address = {
      .sin_family = AF_INET, .sin_port = htons((uint16_t)options.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (c->fd < 0) die("load: no socket: %s", strerror(errno));
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
  load.connects++;
  if (connect(c->fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS) {
    fail(c, E_CONNECT);
    return;
  }
  c->state = CONNECTING;
  watch(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_ADD);
}

/* Starts the next request on `c`, which is idle or closed; it was due at `due_ns`. */
static void start_request(Connection *c, uint64_t due_ns) {
  load.started++;
  load.busy++;
  reader_reset(&c->reader, 1);
  c->reader.head[0] = 0;
  c->failure.size = c->line_size = 0;
  c->first_byte_ns = c->first_event_ns = c->last_event_ns = 0;
  c->events = c->has_done = c->has_error_event = 0;
  c->due_ns = due_ns;
  fill_request(c);
  if (c->state == CLOSED) {
    dial(c);
  } else {
    c->state = BUSY;
    write_out(c);
  }
}

/* Starts what is due. Closed loop: one request on this connection. Open loop: as long as one is due and this one is free. */
static void start_due(Connection *c) {
  uint64_t now = now_ns();
  if (c->state != IDLE && c->state != CLOSED) return;
  if (load.started >= load.limit) return;
  if (load.is_measuring && options.rate > 0) {
    uint64_t due = load.start_ns + (uint64_t)((double)load.started * 1e9 / options.rate);
    if (due <= now) start_request(c, due);
  } else if (now < load.deadline_ns) {
    start_request(c, now);
  }
}

static void end_line(Connection *c) {
  if (c->line_size >= 5 && memcmp(c->line, "data:", 5) == 0) {
    const char *value = c->line + 5;
    size_t size = c->line_size - 5;
    if (size && *value == ' ') value++, size--;
    if (size >= 6 && memcmp(value, "[DONE]", 6) == 0) {
      c->has_done = 1;
    } else {
      if (size >= 8 && memcmp(value, "{\"error\"", 8) == 0) c->has_error_event = 1;
      if (c->events++) sample(&load.gap, load.read_ns - c->last_event_ns);
      else c->first_event_ns = load.read_ns;
      c->last_event_ns = load.read_ns;
    }
  }
  c->line_size = 0;
}

static void take_body(void *owner, const char *data, size_t size) {
  Connection *c = owner;
  if (reader_status(&c->reader) != 200) {
    if (c->failure.size < 300) buffer_add(&c->failure, data, size < 300 ? size : 300);
    return;
  }
  if (!options.is_stream) return;
  const char *end = data + size;
  while (data < end) {
    const char *newline = memchr(data, '\n', (size_t)(end - data));
    size_t piece = (size_t)((newline ? newline : end) - data);
    size_t room = LINE_BYTES - c->line_size;
    memcpy(c->line + c->line_size, data, piece < room ? piece : room);
    c->line_size += piece < room ? piece : room;
    if (newline) end_line(c);
    data += piece + 1;
  }
}

static void judge(Connection *c) {
  int is_short = c->reader.body_bytes < options.bytes_min || (options.is_stream && (!c->has_done || c->events < options.events_min));
  int is_keep_alive = c->reader.is_keep_alive;
  if (reader_status(&c->reader) != 200) end_request(c, 1, E_STATUS);
  else if (c->has_error_event) end_request(c, 1, E_ERROR_EVENT);
  else end_request(c, is_short, E_SHORT);
  if (!is_keep_alive) hang_up(c);
}

static void read_in(Connection *c) {
  static char in[READ_BYTES];
  ssize_t n = recv(c->fd, in, sizeof in, 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (c->state == IDLE) { /* a server may close an idle connection; anything else there is an answer nobody asked for */
    hang_up(c);
    return;
  }
  if (n <= 0) {
    int is_whole = n == 0 && c->reader.phase == BODY_TO_CLOSE;
    if (!is_whole) {
      fail(c, c->state == CONNECTING ? E_CONNECT : E_CUT);
    } else {
      judge(c);
    }
    return;
  }
  load.read_ns = now_ns();
  if (!c->first_byte_ns) c->first_byte_ns = load.read_ns;
  size_t taken = reader_feed(&c->reader, in, (size_t)n, take_body, c);
  if (c->reader.phase == BROKEN || taken < (size_t)n) fail(c, E_CUT);
  else if (c->reader.phase == DONE) judge(c);
}

static void on_ready(Connection *c, uint32_t events) {
  if (c->fd < 0) return;
  if (c->state == CONNECTING && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP))) {
    int error = 0;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &(socklen_t){sizeof error});
    if (error) {
      fail(c, E_CONNECT);
      return;
    }
    c->state = BUSY;
    watch(c, EPOLLIN, EPOLL_CTL_MOD);
    write_out(c);
  } else if (events & EPOLLOUT) {
    watch(c, EPOLLIN, EPOLL_CTL_MOD);
    write_out(c);
  }
  if (c->fd >= 0 && (events & (EPOLLIN | EPOLLERR | EPOLLHUP))) read_in(c);
}

/* ---- the run ---- */

static void give_up(int with_all) {
  uint64_t now = now_ns();
  for (int i = 0; i < options.connections; i++) {
    Connection *c = &load.connections[i];
    if (c->state != BUSY && c->state != CONNECTING) continue;
    if (with_all || now - c->due_ns > (uint64_t)(options.timeout_s * 1e9)) fail(c, E_TIMEOUT);
  }
}

static void arm(uint64_t at_ns) {
  struct itimerspec when = {.it_value = {(time_t)(at_ns / 1000000000u), (long)(at_ns % 1000000000u)}};
  timerfd_settime(load.timer, TFD_TIMER_ABSTIME, &when, NULL);
}

/* When to wake without an event: the next request of the open loop, or in a while for time-outs and the deadline. */
static uint64_t next_wake(uint64_t now) {
  uint64_t soon = now + 50000000u;
  if (!load.is_measuring || options.rate <= 0 || load.started >= load.limit || load.busy >= options.connections) return soon;
  uint64_t due = load.start_ns + (uint64_t)((double)load.started * 1e9 / options.rate);
  return due < soon ? (due > now ? due : now + 1) : soon;
}

/* One phase: starts requests until the limit or the deadline, and returns once the last of them has ended. */
static void run_phase(double duration_s, uint64_t limit) {
  load.started = 0;
  load.limit = limit;
  load.start_ns = load.last_end_ns = now_ns();
  load.deadline_ns = load.start_ns + (uint64_t)(duration_s * 1e9);
  uint64_t end_ns = load.deadline_ns + (uint64_t)(options.timeout_s * 1e9), swept_ns = load.start_ns;
  for (;;) {
    uint64_t now = now_ns();
    int is_over = load.started >= load.limit || (now >= load.deadline_ns && !(load.is_measuring && options.rate > 0));
    if (!is_over)
      for (int i = 0; i < options.connections; i++) start_due(&load.connections[i]);
    if ((is_over && !load.busy) || now >= end_ns) break;
    if (now - swept_ns > 50000000u) {
      give_up(0);
      swept_ns = now;
    }
    arm(next_wake(now));
    struct epoll_event ready[512];
    int count = epoll_wait(load.epoll, ready, 512, -1);
    for (int i = 0; i < count; i++) {
      Connection *c = ready[i].data.ptr;
      uint64_t expirations;
      if (c) on_ready(c, ready[i].events);
      else if (read(load.timer, &expirations, sizeof expirations) < 0) continue;
    }
  }
  give_up(1);
}

static double cpu_s(void) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static void report(double used_cpu_s) {
  double elapsed_s = (double)(load.last_end_ns - load.start_ns) / 1e9;
  uint64_t errors = 0;
  printf("{\"event\":\"result\",\"requests\":%lu,\"elapsed_s\":%.6f,\"requests_per_s\":%.3f,\"client_cpu_s\":%.6f",
         (unsigned long)load.completed, elapsed_s, elapsed_s > 0 ? (double)load.completed / elapsed_s : 0.0, used_cpu_s);
  printf(",\"bytes\":%lu,\"events\":%lu,\"connects\":%lu", (unsigned long)load.bytes, (unsigned long)load.events, (unsigned long)load.connects);
  for (int i = 0; i < ERROR_KINDS; i++) errors += load.errors[i];
  printf(",\"errors\":%lu,\"errors_by_kind\":{", (unsigned long)errors);
  for (int i = 0; i < ERROR_KINDS; i++) printf("%s\"%s\":%lu", i ? "," : "", ERROR_NAMES[i], (unsigned long)load.errors[i]);
  printf("},\"first_failure\":\"%s\",\"tally\":{", load.first_failure);
  for (int i = 0; i < TALLY_MAX && load.tally[i].count; i++)
    printf("%s\"%s\":%lu", i ? "," : "", load.tally[i].value, (unsigned long)load.tally[i].count);
  printf("}");
  print_samples("latency_ms", &load.latency);
  print_samples("first_byte_ms", &load.first_byte);
  print_samples("first_event_ms", &load.first_event);
  print_samples("gap_ms", &load.gap);
  printf("}\n");
}

/* ---- start-up ---- */

static Buffer read_file(const char *path) {
  Buffer all = {0};
  char piece[65536];
  FILE *file = fopen(path, "rb");
  if (!file) die("load: %s: %s", path, strerror(errno));
  for (size_t n; (n = fread(piece, 1, sizeof piece, file));) buffer_add(&all, piece, n);
  fclose(file);
  return all;
}

static void read_bodies(const char *path) {
  Buffer all = read_file(path);
  size_t room = 0;
  for (char *at = all.data, *end = all.data + all.size; at < end;) {
    char *newline = memchr(at, '\n', (size_t)(end - at));
    size_t size = (size_t)((newline ? newline : end) - at);
    if (size) {
      if (load.body_count == room) load.bodies = realloc(load.bodies, (room = room * 2 + 64) * sizeof *load.bodies);
      if (!load.bodies) die("out of memory");
      char *mark = memmem(at, size, UNIQUE, 16);
      load.bodies[load.body_count++] = (Body){at, size, mark ? mark - at : -1};
    }
    at += size + 1;
  }
  if (!load.body_count) die("load: %s: no bodies", path);
}

static void read_order(const char *path) {
  Buffer all = read_file(path);
  load.order = (uint32_t *)(void *)all.data;
  load.order_size = all.size / sizeof *load.order;
  for (size_t i = 0; i < load.order_size; i++)
    if (load.order[i] >= load.body_count) die("load: %s: index %u of %zu bodies", path, load.order[i], load.body_count);
}

static void read_options(int argc, char **argv) {
  const char *bodies = NULL, *order = NULL;
  Buffer extra = {0};
  for (int i = 1; i < argc; i++) {
    const char *name = argv[i];
    int is_stream = strcmp(name, "--stream") == 0, is_waiting = strcmp(name, "--wait") == 0;
    options.is_stream |= is_stream;
    options.is_waiting |= is_waiting;
    if (is_stream || is_waiting) continue;
    if (++i == argc) usage();
    const char *value = argv[i];
    if (strcmp(name, "--port") == 0) options.port = atoi(value);
    else if (strcmp(name, "--bodies") == 0) bodies = value;
    else if (strcmp(name, "--order") == 0) order = value;
    else if (strcmp(name, "--path") == 0) options.path = value;
    else if (strcmp(name, "--header") == 0) buffer_printf(&extra, "%s\r\n", value);
    else if (strcmp(name, "--connections") == 0) options.connections = atoi(value);
    else if (strcmp(name, "--rate") == 0) options.rate = atof(value);
    else if (strcmp(name, "--duration") == 0) options.duration_s = atof(value);
    else if (strcmp(name, "--count") == 0) options.count = strtoull(value, NULL, 10);
    else if (strcmp(name, "--warmup") == 0) options.warmup_s = atof(value);
    else if (strcmp(name, "--warmup-count") == 0) options.warmup_count = strtoull(value, NULL, 10);
    else if (strcmp(name, "--timeout") == 0) options.timeout_s = atof(value);
    else if (strcmp(name, "--events-min") == 0) options.events_min = atoi(value);
    else if (strcmp(name, "--bytes-min") == 0) options.bytes_min = strtoull(value, NULL, 10);
    else if (strcmp(name, "--tally") == 0) options.tally = value;
    else usage();
  }
  if (!options.port || !bodies || options.connections < 1 || options.connections > CONNECTIONS_MAX) usage();
  if (options.duration_s > DURATION_S_MAX || options.count > COUNT_MAX || options.timeout_s <= 0) usage();
  read_bodies(bodies);
  if (order) read_order(order);
  buffer_printf(&options.headers, "POST %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\naccept: %s\r\n", options.path,
                options.port, options.is_stream ? "text/event-stream" : "application/json");
  buffer_add(&options.headers, extra.data ? extra.data : "", extra.size);
}

int main(int argc, char **argv) {
  read_options(argc, argv);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  struct rlimit files = {CONNECTIONS_MAX + 64, CONNECTIONS_MAX + 64};
  setrlimit(RLIMIT_NOFILE, &files);
  load.epoll = epoll_create1(EPOLL_CLOEXEC);
  load.timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
  epoll_ctl(load.epoll, EPOLL_CTL_ADD, load.timer, &event);
  load.connections = calloc((size_t)options.connections, sizeof *load.connections);
  if (!load.connections) die("out of memory");
  for (int i = 0; i < options.connections; i++) load.connections[i].fd = -1;

  if (options.warmup_s > 0) run_phase(options.warmup_s, options.warmup_count ? options.warmup_count : COUNT_MAX);
  printf("{\"event\":\"measuring\"}\n");
  fflush(stdout);
  if (options.is_waiting && getchar() == EOF) die("load: nobody said go");
  load.is_measuring = 1;
  double before_s = cpu_s();
  uint64_t limit = options.count;
  if (options.rate > 0 && options.rate * options.duration_s < (double)limit) limit = (uint64_t)(options.rate * options.duration_s);
  run_phase(options.duration_s, limit);
  if (options.rate > 0) load.errors[E_UNSENT] = limit - load.started;
  report(cpu_s() - before_s);
  return 0;
}
