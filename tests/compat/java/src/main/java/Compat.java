// @IMPORTS@ The runner puts the client's packages here: they were renamed between its releases.

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Flow;
import java.util.concurrent.Future;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * The official Java client, unchanged, against a broker: one line a scenario, ok or FAIL and why.
 *
 * <p>Usage: Compat URL [SCENARIO...]. A scenario that needs the broker restarted prints @restart, or @kill for
 * SIGKILL to all of it, and waits for a line on standard input.
 */
public final class Compat {
    private static final int SCENARIO_TIMEOUT_S = 60;
    private static final int RECEIVE_TIMEOUT_S = 15;
    private static final int QUIET_MS = 700;
    private static final String FIRST =
            "{\"type\":\"object\",\"properties\":{\"id\":{\"type\":\"integer\"}},\"required\":[\"id\"]}";
    private static final String SECOND =
            "{\"type\":\"object\",\"properties\":{\"id\":{\"type\":\"integer\"},\"note\":{\"type\":\"string\"}},"
                    + "\"required\":[\"id\"]}";
    private static final String WORSE =
            "{\"type\":\"object\",\"properties\":{\"id\":{\"type\":\"string\"}},\"required\":[\"id\"]}";
    private static final BufferedReader INPUT = new BufferedReader(new InputStreamReader(System.in));

    private interface Scenario {
        void run(DanubeClient client, String topic) throws Exception;
    }

    public static void main(String[] words) throws Exception {
        Map<String, Scenario> scenarios = new LinkedHashMap<>();
        scenarios.put("exclusive", Compat::exclusive);
        scenarios.put("shared", Compat::shared);
        scenarios.put("failover", Compat::failover);
        scenarios.put("partitioned", Compat::partitioned);
        scenarios.put("non-reliable", Compat::nonReliable);
        scenarios.put("resume", Compat::resume);
        scenarios.put("schema-subject", Compat::schemaSubject);
        scenarios.put("schema-compatibility", Compat::schemaCompatibility);
        scenarios.put("restart", (client, topic) -> goOnAfter("@restart", client, topic));
        scenarios.put("kill", (client, topic) -> goOnAfter("@kill", client, topic));
        Set<String> wanted = new HashSet<>(List.of(words).subList(1, words.length));
        ExecutorService threads = Executors.newCachedThreadPool();
        boolean failed = false;
        for (Map.Entry<String, Scenario> one : scenarios.entrySet()) {
            if (!wanted.isEmpty() && !wanted.contains(one.getKey())) {
                continue;
            }
            String failure = failure(threads, words[0], one.getKey(), one.getValue());
            failed |= failure != null;
            System.out.println(failure == null ? "ok " + one.getKey() : "FAIL " + one.getKey() + ": " + failure);
        }
        System.out.println("skipped key-shared: not in every release of this client");
        System.out.println("skipped nack: not in every release of this client");
        System.exit(failed ? 1 : 0);
    }

    private static String failure(ExecutorService threads, String url, String name, Scenario scenario)
            throws Exception {
        Callable<Void> task = () -> {
            DanubeClient client = DanubeClient.builder().serviceUrl(url).build();
            scenario.run(client, "/default/java-" + name);
            return null;
        };
        Future<Void> done = threads.submit(task);
        try {
            done.get(SCENARIO_TIMEOUT_S, TimeUnit.SECONDS);
            return null;
        } catch (TimeoutException late) {
            done.cancel(true);
            return "not done within " + SCENARIO_TIMEOUT_S + " s";
        } catch (java.util.concurrent.ExecutionException error) {
            return String.valueOf(error.getCause()).replace('\n', ' ');
        }
    }

    // -- steps ----------------------------------------------------------------------------------

    private static void ensure(boolean condition, String what) {
        if (!condition) {
            throw new IllegalStateException(what);
        }
    }

    private static Producer reliable(DanubeClient client, String topic, String name) {
        Producer producer = client.newProducer().withTopic(topic).withName(name)
                .withDispatchStrategy(DispatchStrategy.RELIABLE).build();
        producer.create();
        return producer;
    }

    private static void send(Producer producer, int first, int end) {
        for (String payload : numbered(first, end)) {
            producer.send(payload.getBytes(StandardCharsets.UTF_8), Map.of());
        }
    }

    private static List<String> numbered(int first, int end) {
        List<String> found = new ArrayList<>();
        for (int number = first; number < end; number++) {
            found.add("m" + number);
        }
        return found;
    }

    private static String text(StreamMessage message) {
        return new String(message.payload(), StandardCharsets.UTF_8);
    }

    private static void askFor(String word) throws Exception {
        System.out.println(word);
        INPUT.readLine();
    }

    /** A consumer with the messages that came. */
    private static final class Reader implements Flow.Subscriber<StreamMessage> {
        private final Consumer consumer;
        private final LinkedBlockingQueue<StreamMessage> messages = new LinkedBlockingQueue<>();
        private volatile Throwable failure;

        Reader(DanubeClient client, String topic, String name, SubType kind) {
            consumer = client.newConsumer().withTopic(topic).withConsumerName(name)
                    .withSubscription("s").withSubscriptionType(kind).build();
            consumer.subscribe();
            consumer.receive().subscribe(this);
        }

        @Override
        public void onSubscribe(Flow.Subscription subscription) {
            subscription.request(Long.MAX_VALUE);
        }

        @Override
        public void onNext(StreamMessage message) {
            messages.add(message);
        }

        @Override
        public void onError(Throwable error) {
            failure = error;
        }

        @Override
        public void onComplete() {
            failure = new IllegalStateException("the stream of messages ended");
        }

        StreamMessage next() throws Exception {
            StreamMessage message = messages.poll(RECEIVE_TIMEOUT_S, TimeUnit.SECONDS);
            ensure(message != null, "no message within " + RECEIVE_TIMEOUT_S + " s; " + failure);
            return message;
        }

        List<String> take(int count) throws Exception {
            List<String> found = new ArrayList<>();
            while (found.size() < count) {
                StreamMessage message = next();
                consumer.ack(message);
                found.add(text(message));
            }
            return found;
        }

        List<String> drain() throws Exception {
            List<String> found = new ArrayList<>();
            StreamMessage message;
            while ((message = messages.poll(QUIET_MS, TimeUnit.MILLISECONDS)) != null) {
                consumer.ack(message);
                found.add(text(message));
            }
            return found;
        }

        void close() {
            consumer.close();
        }
    }

    // -- scenarios ------------------------------------------------------------------------------

    private static void exclusive(DanubeClient client, String topic) throws Exception {
        Producer producer = reliable(client, topic, "p");
        Reader reader = new Reader(client, topic, "c", SubType.EXCLUSIVE);
        boolean refused = false;
        try {
            new Reader(client, topic, "other", SubType.EXCLUSIVE).close();
        } catch (RuntimeException error) {
            refused = true;
        }
        ensure(refused, "a second exclusive consumer was let in");
        send(producer, 0, 20);
        ensure(reader.take(20).equals(numbered(0, 20)), "out of order");
        reader.close();
    }

    private static void shared(DanubeClient client, String topic) throws Exception {
        Producer producer = reliable(client, topic, "p");
        Reader first = new Reader(client, topic, "c1", SubType.SHARED);
        Reader second = new Reader(client, topic, "c2", SubType.SHARED);
        send(producer, 0, 40);
        List<String> one = new ArrayList<>();
        List<String> two = new ArrayList<>();
        for (int turn = 0; turn < 20 && one.size() + two.size() < 40; turn++) {
            one.addAll(first.drain());
            two.addAll(second.drain());
        }
        Set<String> all = new HashSet<>(one);
        all.addAll(two);
        ensure(all.size() == 40 && one.size() + two.size() == 40, all.size() + " of 40 messages came");
        ensure(!one.isEmpty() && !two.isEmpty(), "one of two consumers got nothing");
        first.close();
        second.close();
    }

    private static void failover(DanubeClient client, String topic) throws Exception {
        Producer producer = reliable(client, topic, "p");
        Reader active = new Reader(client, topic, "c1", SubType.FAIL_OVER);
        Reader standby = new Reader(client, topic, "c2", SubType.FAIL_OVER);
        send(producer, 0, 10);
        ensure(active.take(10).equals(numbered(0, 10)), "the active consumer lacks messages");
        active.close();
        send(producer, 10, 20);
        ensure(standby.take(10).equals(numbered(10, 20)), "the standby did not take over");
        standby.close();
    }

    private static void partitioned(DanubeClient client, String topic) throws Exception {
        Producer producer = client.newProducer().withTopic(topic).withName("p").withPartitions(3)
                .withDispatchStrategy(DispatchStrategy.RELIABLE).build();
        producer.create();
        Reader reader = new Reader(client, topic, "c", SubType.EXCLUSIVE);
        send(producer, 0, 30);
        ensure(new HashSet<>(reader.take(30)).size() == 30, "messages are missing");
        reader.close();
    }

    private static void nonReliable(DanubeClient client, String topic) throws Exception {
        Producer producer = client.newProducer().withTopic(topic).withName("p").build();
        producer.create();
        Reader reader = new Reader(client, topic, "c", SubType.EXCLUSIVE);
        // The stream must be open before a message that is not kept can be seen.
        boolean seen = false;
        for (int turn = 0; turn < 20 && !seen; turn++) {
            producer.send("warm".getBytes(StandardCharsets.UTF_8), Map.of());
            seen = !reader.drain().isEmpty();
        }
        send(producer, 0, 20);
        ensure(reader.take(20).equals(numbered(0, 20)), "messages are missing");
        reader.close();
    }

    private static void resume(DanubeClient client, String topic) throws Exception {
        Producer producer = reliable(client, topic, "p");
        Reader reader = new Reader(client, topic, "c", SubType.EXCLUSIVE);
        send(producer, 0, 10);
        // One by one: what this client holds unacknowledged comes again to the next consumer.
        ensure(reader.take(4).equals(numbered(0, 4)), "the first messages are wrong");
        reader.close();
        Reader later = new Reader(client, topic, "c", SubType.EXCLUSIVE);
        ensure(later.take(6).equals(numbered(4, 10)), "it did not go on where it was");
        later.close();
    }

    private static void goOnAfter(String word, DanubeClient client, String topic) throws Exception {
        Producer producer = reliable(client, topic, "p");
        Reader reader = new Reader(client, topic, "c", SubType.EXCLUSIVE);
        send(producer, 0, 10);
        ensure(reader.take(10).equals(numbered(0, 10)), "messages are missing before the restart");
        send(producer, 10, 15);
        askFor(word);
        send(producer, 15, 20);
        Map<String, Boolean> found = new HashMap<>();
        while (found.size() < 10) {
            StreamMessage message = reader.next();
            reader.consumer.ack(message);
            if (numbered(10, 20).contains(text(message))) {
                found.put(text(message), true);
            }
        }
        reader.close();
    }

    private static SchemaRegistration register(DanubeClient client, String subject, String definition) {
        SchemaRegistryClient registry = client.newSchemaRegistry();
        return registry.registerSchema(registry.newRegistration().withSubject(subject)
                .withSchemaType(SchemaType.JSON_SCHEMA)
                .withSchemaDefinition(definition.getBytes(StandardCharsets.UTF_8)));
    }

    private static void schemaSubject(DanubeClient client, String topic) throws Exception {
        String subject = topic.substring(1).replace('/', '-');
        SchemaRegistration made = register(client, subject, FIRST);
        ensure(register(client, subject, FIRST).schemaId() == made.schemaId(), "the definition got another id");
        Producer producer = client.newProducer().withTopic(topic).withName("p").withSchemaLatest(subject)
                .withDispatchStrategy(DispatchStrategy.RELIABLE).build();
        producer.create();
        Reader reader = new Reader(client, topic, "c", SubType.EXCLUSIVE);
        producer.send("{\"id\":1}".getBytes(StandardCharsets.UTF_8), Map.of());
        StreamMessage message = reader.next();
        ensure(message.schemaId() != null && message.schemaId() == made.schemaId(), "the message names no schema");
        reader.close();
    }

    private static void schemaCompatibility(DanubeClient client, String topic) {
        String subject = topic.substring(1).replace('/', '-');
        register(client, subject, FIRST);
        SchemaRegistryClient registry = client.newSchemaRegistry();
        byte[] fine = SECOND.getBytes(StandardCharsets.UTF_8);
        byte[] worse = WORSE.getBytes(StandardCharsets.UTF_8);
        ensure(registry.checkCompatibility(subject, fine, SchemaType.JSON_SCHEMA).compatible(), "refused");
        ensure(!registry.checkCompatibility(subject, worse, SchemaType.JSON_SCHEMA).compatible(), "taken");
        boolean refused = false;
        try {
            register(client, subject, WORSE);
        } catch (RuntimeException error) {
            refused = true;
        }
        ensure(refused, "an incompatible version was registered");
    }
}
